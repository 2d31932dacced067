"""Floating-point operations of a training step, and what GPUs could do at most, for MFU."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from trainkit.models.attention import attention_heads
from trainkit.models.linears import num_weights

if TYPE_CHECKING:
    from trainkit.estimate.gpus import Gpu

# Dense bf16 tensor-core peaks in FLOP/s by NVIDIA's datasheets (without sparsity). The first name
# found in the device's own name counts.
_PEAK_BF16_FLOPS = (
    ("B200", 2.25e15),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("RTX 4090", 165e12),
    ("A6000", 155e12),
)


def peak_flops() -> float | None:
    """The dense bf16 peak of the current GPU, or None where it is not known."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in _PEAK_BF16_FLOPS if part in name), None)


def training_flops_per_token(model: Any, max_length: int) -> float:
    """Forward and backward FLOPs per token: 6 per parameter that multiplies, plus causal attention.

    Counted as PaLM (arXiv:2204.02311, appendix B) counts them, attention halved because it is
    causal. The input embedding is a look-up and does not count, the output head does. A frozen
    weight needs no gradient of its own and counts 4. Of a mixture's experts, those count that a
    token is sent to.

    Args:
        model: the transformers or peft model as it is trained.
        max_length: tokens per sequence, for the attention term.
    """
    config = model.config.get_text_config()
    trained = frozen = 0.0
    active_share = _active_share(config)
    counted: set[int] = set()
    embeddings = {id(p) for p in model.get_input_embeddings().parameters()}
    head = model.get_output_embeddings()
    head_parameters = {id(p) for p in head.parameters()} if head is not None else set()
    for name, parameter in model.named_parameters():
        is_lookup = id(parameter) in embeddings and id(parameter) not in head_parameters
        if id(parameter) in counted or is_lookup:
            continue
        counted.add(id(parameter))
        is_expert = ".experts." in name
        size = num_weights(parameter) * (active_share if is_expert else 1.0)
        trained += size if parameter.requires_grad else 0
        frozen += 0 if parameter.requires_grad else size
    attention = 6 * sum(heads * size for heads, size in attention_heads(config)) * max_length
    return 6.0 * trained + 4.0 * frozen + attention


def _active_share(config: Any) -> float:
    """The share of the routed experts that one token goes through; 1 without experts."""

    def first(*names: str) -> int | None:
        values = (getattr(config, name, None) for name in names)
        return next((value for value in values if isinstance(value, int) and value > 0), None)

    num_active = first("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")
    num_experts = first("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return num_active / num_experts if num_active and num_experts else 1.0


_UNKNOWN_GPU = "a100-80g"
"""Whose speed is taken for a GPU that the table does not have."""


def this_gpu() -> "Gpu | None":
    """This process's GPU with the memory that it really has; None without one."""
    if not torch.cuda.is_available():
        return None
    from trainkit.estimate.gpus import GPUS, gpu_named

    name = torch.cuda.get_device_name()
    row = gpu_named(name) or replace(GPUS[_UNKNOWN_GPU], name=name)
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return replace(row, memory_gib=total / 2**30)
