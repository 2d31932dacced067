"""What a quantised base cannot be."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig

from trainkit.auto_class import empty_model
from trainkit.errors import RecipeError
from trainkit.kernels.fp8.function import why_no_fp8
from trainkit.lora.targets import expert_parameters


def refuse_unfit_device(quantize: str, device: torch.device) -> None:
    """Refuse fp8 where it cannot run, before anything is loaded.

    Args:
        quantize: a row of the table of linear layers.
        device: where the model will train.

    Raises:
        RecipeError: with the reason.
    """
    if quantize != "fp8":
        return
    if reason := why_no_fp8(device):
        raise RecipeError(
            reason,
            where="lora.quantize",
            fix="set lora.quantize: nf4, or remove it",
        )


def refuse_unpacked_experts(
    config: PreTrainedConfig, name: str, quantize: str = "nf4", *, trust_remote_code: bool = False
) -> None:
    """Refuse a packed base for a model whose experts would stay as they are.

    Linear layers are packed; experts are parameters of three dimensions in transformers 5,
    and they are most of such a model. The model is built without memory for its weights.

    Args:
        config: the model's.
        name: the model, for the message.
        quantize: what it is packed to.
        trust_remote_code: run code that comes with the model.

    Raises:
        RecipeError: with what would be packed and what would not.
    """
    model = empty_model(config, trust_remote_code=trust_remote_code)
    experts = sum(parameter.numel() for parameter in expert_parameters(model).values())
    if not experts:
        return
    total = sum(parameter.numel() for parameter in model.parameters())
    raise RecipeError(
        f"{quantize} packs linear layers only; the experts of {name}, {experts / total:.0%} of its "
        f"{total / 1e9:.1f} billion weights, would stay in 16 bits ({experts * 2 / 2**30:.1f} GiB)",
        where="lora.quantize",
        fix="remove lora.quantize and shard the base instead (deepspeed: zero3), or take a dense "
        "model",
    )
