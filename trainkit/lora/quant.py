"""What a quantised base cannot be."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig

from trainkit.auto_class import auto_class
from trainkit.errors import RecipeError
from trainkit.lora.targets import expert_parameters


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
