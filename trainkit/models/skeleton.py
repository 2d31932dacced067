"""A model that has names and shapes, and no memory for its weights: each rank reads its part later.

It is prepared for training as one with weights: adapters, kernels and attention go into it before
it is sharded. What would have to read a weight cannot be done to it, see `trainkit.train.model`.

Random weights, made where they will be: of all of a model, or of what this rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from trainkit.parallel.slices import ATTRIBUTE, WeightFiles


def skeleton(
    load: Callable[..., tuple[Any, Any]],
    source_path: str,
    device: torch.device,
    is_wanted: Callable[[nn.Module], bool],
) -> PreTrainedModel | None:
    """A model without its weights.

    Returns:
        None where it is not wanted, or where its files have to be converted to be read.
    """
    model, report = load(device_map={"": "meta"})
    if not is_wanted(model) or report["missing_keys"] or not any(True for _ in model.buffers()):
        return None  # without a buffer nothing would say where the model computes
    if any(isinstance(each, WeightConverter) for each in get_model_conversion_mapping(model)):
        return None
    files = WeightFiles.of(model, directory_of(source_path, model))
    if files is None:
        return None
    for module, owner in in_order(model, model):
        empty = {name: b for name, b in module._buffers.items() if b is not None and b.is_meta}
        for name, buffer in empty.items():
            module._buffers[name] = torch.empty_like(buffer, device=device)
        if empty:
            owner._init_weights(module)
    setattr(model, ATTRIBUTE, files)
    made: PreTrainedModel = model
    return made


def directory_of(source_path: str, model: PreTrainedModel) -> Path:
    """Where a loaded model's files are, its own directory or the hub's cache."""
    if Path(source_path).is_dir():
        return Path(source_path)
    revision = getattr(model.config, "_commit_hash", None)
    found = huggingface_hub.try_to_load_from_cache(source_path, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else Path(source_path)


def is_skeleton(model: nn.Module) -> bool:
    """Whether ranks are to read their parts of a model."""
    return hasattr(model, ATTRIBUTE)


@contextmanager
def standing_in(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Within, weights without memory seem to be on a device, each with one element behind it.

    peft puts adapters where the weights are that they adapt.
    """
    aside = []
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None and weight.is_meta:
                one: Any = torch.zeros((), dtype=weight.dtype, device=device).expand(weight.shape)
                aside.append((module, name, weight, nn.Parameter(one, weight.requires_grad)))
    for module, name, _, seeming in aside:
        module._parameters[name] = seeming
    try:
        yield
    finally:
        for module, name, weight, seeming in aside:
            weight.requires_grad_(seeming.requires_grad)
            module._parameters[name] = weight


def random_model(
    loader: Any, config: Any, device: torch.device | None, **options: Any
) -> PreTrainedModel:
    """A whole model.

    Without a device DeepSpeed shards it while it makes it.
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
