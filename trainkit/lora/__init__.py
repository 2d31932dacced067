"""Adapters: attach, save, merge, and the fused backward."""

from trainkit.lora.adapter import LoraOptions, attach, load_adapter
from trainkit.lora.fused import fuse
from trainkit.models.linears import quantization_config

__all__ = ["LoraOptions", "attach", "fuse", "load_adapter", "quantization_config"]
