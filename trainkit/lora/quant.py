"""4-bit bases: how to load one, and how to read one of its weights.

bitsandbytes does the quantising. Its storage dtype follows the compute dtype, because ZeRO-3 and
FSDP shard only parameters of a floating dtype.
"""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedConfig

from trainkit.errors import RecipeError
from trainkit.kernels.lora.projection import Unpack
from trainkit.lora.targets import expert_parameters
from trainkit.models.auto import auto_class

QUANTIZATIONS = ("nf4",)


def quantization_config(
    quantize: str = "nf4",
    compute_dtype: torch.dtype = torch.bfloat16,
    *,
    double_quant: bool = True,
) -> BitsAndBytesConfig:
    """The ``quantization_config`` for ``from_pretrained``.

    Args:
        quantize: "nf4" is the only kind.
        compute_dtype: what the weights are dequantised to and the matmuls run in.
        double_quant: quantise the scales too (0.37 bit a weight less).

    Raises:
        RecipeError: an unknown kind, or bitsandbytes is not installed.
    """
    if quantize not in QUANTIZATIONS:
        raise RecipeError(
            f"quantize {quantize!r} is not one of {', '.join(QUANTIZATIONS)}", where="lora.quantize"
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise RecipeError(
            "a quantised base needs bitsandbytes, which is not installed",
            where="lora.quantize",
            fix="pip install 'trainkit[qlora]'",
        )
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantize,
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=compute_dtype,
        bnb_4bit_quant_storage=compute_dtype,
    )


def refuse_unpacked_experts(config: PreTrainedConfig, name: str) -> None:
    """Refuse 4 bits for a model whose experts would stay as they are.

    bitsandbytes packs linear layers; experts are parameters of three dimensions in transformers 5,
    and they are most of such a model. The model is built without memory for its weights.

    Args:
        config: the model's.
        name: the model, for the message.

    Raises:
        RecipeError: with what would be packed and what would not.
    """
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    experts = sum(parameter.numel() for parameter in expert_parameters(model).values())
    if not experts:
        return
    total = sum(parameter.numel() for parameter in model.parameters())
    raise RecipeError(
        f"nf4 packs linear layers only; the experts of {name}, {experts / total:.0%} of its "
        f"{total / 1e9:.1f} billion weights, would stay in 16 bits ({experts * 2 / 2**30:.1f} GiB)",
        where="lora.quantize",
        fix="remove lora.quantize and shard the base instead (deepspeed: zero3), or take a dense "
        "model",
    )


def is_quantized(linear: nn.Module) -> bool:
    """Whether a linear layer's weight is packed by bitsandbytes in 4 bits."""
    return type(linear).__name__ == "Linear4bit" and type(linear).__module__.startswith(
        "bitsandbytes"
    )


def keep_trainable_on_cpu(model: nn.Module) -> None:
    """Keep bitsandbytes from repacking 4-bit weights for inference on a CPU.

    With AVX-512 it does so at the first forward in evaluation mode (a self-check, an evaluation),
    for good; the repacked weights pass no gradient to what comes before, and a layer with a bias
    then fails.
    """
    for module in model.modules():
        if is_quantized(module) and hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def unpacker(linear: Any) -> Unpack:
    """How to read a 4-bit layer's weight: packed storage in, (N, K) in the wanted dtype out.

    The quantisation state is taken now, the storage when the weight is used: under ZeRO-3 the
    storage is sharded and the state is not. The kernel writes the wanted dtype directly.
    """
    from bitsandbytes.functional import dequantize_4bit

    state = linear.weight.quant_state or linear.quant_state

    def unpack(storage: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        wanted = state
        if state.dtype != dtype:
            wanted = copy.copy(state)
            wanted.dtype = dtype
        return dequantize_4bit(storage, wanted)

    return unpack
