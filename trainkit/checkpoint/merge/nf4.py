"""The base that a QLoRA run saw: weights through 4 bits and back."""

import importlib.util
from pathlib import Path

import torch
from torch import Tensor

from trainkit.errors import CheckpointError


def quantized_names(directory: Path) -> set[str]:
    """The weights that loading in 4 bits packs: those of linear layers, but not the output one.

    Args:
        directory: holds config.json; the model is built without memory for its weights.
    """
    from transformers import AutoConfig

    from trainkit.auto_class import auto_class

    config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    head = model.get_output_embeddings()
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }


def through_nf4(weight: Tensor, compute_dtype: torch.dtype) -> Tensor:
    """Pack to nf4 with packed scales and unpack again, as a QLoRA run's forward does.

    Args:
        weight: any float dtype.
        compute_dtype: what the run loaded the weights in and unpacks them to.

    Raises:
        CheckpointError: bitsandbytes is not installed.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise CheckpointError(
            "the 4-bit base needs bitsandbytes, which is not installed",
            fix="pip install 'trainkit[qlora]', or merge into the base as it was: --base original",
        )
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    packed, state = quantize_4bit(
        weight.to(compute_dtype).contiguous(), quant_type="nf4", compress_statistics=True
    )
    unpacked = dequantize_4bit(packed, state)
    assert isinstance(unpacked, Tensor)
    return unpacked
