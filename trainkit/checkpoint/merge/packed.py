"""The base that a run over a quantised base saw: weights through 4 or 8 bits and back."""

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from trainkit.errors import CheckpointError
from trainkit.kernels.fp8.function import fits_fp8, fp8_quantize
from trainkit.kernels.fp8.linear import Fp8Weight


def quantized_names(directory: Path) -> set[str]:
    """The weights that a quantised base packs: those of linear layers, but not the output one.

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


def through_fp8(weight: Tensor, compute_dtype: torch.dtype) -> Tensor:
    """Quantise to e4m3 with a scale a row and back, as a run over an fp8 base saw the weight.

    Args:
        weight: (N, K), any float dtype; a shape that stays in 16 bits comes back as it is.
        compute_dtype: what the run loaded the weights in.
    """
    weight = weight.to(compute_dtype)
    if not fits_fp8(*weight.shape):
        return weight
    codes, scales = fp8_quantize(weight)
    return Fp8Weight(scales)(codes.view(torch.uint8), compute_dtype)


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


THROUGH: Mapping[str, Callable[[Tensor, torch.dtype], Tensor]] = {
    "nf4": through_nf4,
    "fp8": through_fp8,
}
"""By ``lora.quantize``: a weight (N, K) and the dtype it was loaded in, to what training saw."""
