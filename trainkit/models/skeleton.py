"""A model that has names and shapes, and no memory for its weights: each rank reads its part later.

It is prepared for training as one with weights: adapters, kernels and attention go into it before
it is sharded. What would have to read a weight cannot be done to it, see `trainkit.train.model`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from trainkit.models.random_weights import in_order
from trainkit.parallel.slices import ATTRIBUTE, WeightFiles


def skeleton(
    load: Callable[..., tuple[Any, Any]],
    source_path: str,
    device: torch.device,
    is_wanted: Callable[[nn.Module], bool],
) -> PreTrainedModel | None:
    """A model without its weights.

    Args:
        load: ``from_pretrained``, with more of its arguments.
        source_path: the model's directory, or its name on the hub.
        device: where its buffers (tables of the rotary embedding) are made.
        is_wanted: of a model on the meta device: whether ranks are to read their parts.

    Returns:
        None where it is not wanted, or where its files have to be converted to be read.
    """
    model, report = load(device_map={"": "meta"})
    if not is_wanted(model) or report["missing_keys"] or not any(True for _ in model.buffers()):
        return None  # without a buffer nothing would say where the model computes
    if any(isinstance(each, WeightConverter) for each in get_model_conversion_mapping(model)):
        return None
    files = WeightFiles.of(model, _directory(source_path, model))
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


def _directory(source_path: str, model: PreTrainedModel) -> Path:
    """Where the files are that ``from_pretrained`` has found."""
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

    Args:
        model: a skeleton; what is done to ``requires_grad`` within stays.
        device: where adapters are to be.
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
