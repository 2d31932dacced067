"""Random weights, made where they will be: of all of a model, or of what this rank holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def random_model(
    loader: Any, config: Any, device: torch.device | None, **options: Any
) -> PreTrainedModel:
    """A whole model.

    Args:
        loader: an Auto class.
        config: of the model.
        device: where it is made; None leaves it to DeepSpeed, which shards while it makes it.
        options: ``dtype``, ``attn_implementation``, and ``trust_remote_code``.
    """
    with nullcontext() if device is None else torch.device(device):
        model: PreTrainedModel = loader.from_config(config, **options)
    return model


@torch.no_grad()
def random_part(
    model_class: Any, config: Any, device: torch.device, **options: Any
) -> PreTrainedModel:
    """A model without the modules that its class sets aside, which other ranks hold.

    Every rank draws all weights, one module after another, and keeps its own; so what several ranks
    hold is the same, and no rank has memory for more than its part and one module.

    Args:
        model_class: as `trainkit.parallel.engine.Engine.load_part` gives it.
        config: of the model.
        device: where it is made.
        options: ``dtype`` and ``attn_implementation``.
    """
    with torch.device("meta"):
        model = model_class._from_config(config, **options)
    aside = [*model.set_aside]
    mine = [(parent, name, parent._modules[name]) for parent, name, _ in aside]
    for parent, name, module in aside:
        parent._modules[name] = module
    elsewhere = {id(part) for *_, module in aside for part in module.modules()}
    for module, owner in in_order(model, model):
        module.to_empty(device=device, recurse=False)
        owner._init_weights(module)
        if id(module) in elsewhere:
            module.to_empty(device=torch.device("meta"), recurse=False)
    for parent, name, module in mine:
        parent._modules[name] = module
    return model


def in_order(module: nn.Module, owner: Any) -> Iterator[tuple[nn.Module, Any]]:
    """Children first, each with the model whose rules it is initialised by."""
    for child in module.children():
        yield from in_order(
            child, child if isinstance(child, transformers.PreTrainedModel) else owner
        )
    yield module, owner
