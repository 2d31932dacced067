"""Weights that stay as they are: what ``model.frozen`` names, and towers that no text reaches."""

import fnmatch
import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from trainkit.errors import ModelError
from trainkit.options.section import ask, nearest
from trainkit.patterns import has_part

_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.")
_LAYERS = re.compile(r"(?:(\d+)(?:-(\d+))?|last-(\d+))(?:\.(.+))?")
_EXCEPT = "!"


def freeze(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Parameter]:
    """Take gradients away from the parameters that patterns name, the last that fits deciding.

    Args:
        model: its parameters that train so far.
        patterns: ``7``, ``0-11`` and ``last-8`` (the last eight) are layers, ``last-8.mlp`` a part
            of them; ``embed_tokens`` and ``self_attn.q_proj`` parts of a name;
            ``model.layers.*.mlp.*`` a whole name; ``!`` in front trains what it names.

    Returns:
        What is frozen by this, by name.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    num_layers = 1 + max(_layers_of(trained), default=-1)
    frozen: dict[str, nn.Parameter] = {}
    for pattern in patterns:
        named = [name for name in trained if _fits(name, pattern.removeprefix(_EXCEPT), num_layers)]
        if not named:
            raise ModelError(
                f"model.frozen: no parameter of the model is named by {pattern!r}",
                where="model.frozen",
                fix=_advice(pattern, trained),
            )
        for name in named:
            if pattern.startswith(_EXCEPT):
                frozen.pop(name, None)
            else:
                frozen[name] = trained[name]
    if len(frozen) == len(trained):
        raise ModelError(
            "model.frozen leaves nothing to train",
            where="model.frozen",
            fix="name fewer, or add `!NAME` for what is to train",
        )
    for parameter in frozen.values():
        parameter.requires_grad_(False)
    return frozen


def _fits(name: str, pattern: str, num_layers: int) -> bool:
    layers = _LAYERS.fullmatch(pattern)
    if layers is not None:
        found = _LAYER.search(name)
        if found is None or (layers[4] and not has_part(name, [layers[4]])):
            return False
        if layers[3] is not None:
            return int(found[1]) >= num_layers - int(layers[3])
        first = int(layers[1])
        return first <= int(found[1]) <= (first if layers[2] is None else int(layers[2]))
    if any(sign in pattern for sign in "*?["):
        return fnmatch.fnmatchcase(name, pattern)
    return has_part(name, [pattern])


def _layers_of(names: Iterable[str]) -> list[int]:
    return [int(found[1]) for name in names if (found := _LAYER.search(name))]


def _advice(pattern: str, trained: dict[str, nn.Parameter]) -> str:
    parts = sorted({part for name in trained for part in name.split(".") if not part.isdigit()})
    hint = ask(nearest(pattern.removeprefix(_EXCEPT), parts)) or ""
    last = max(_layers_of(trained), default=0)
    return f"{hint} its layers are 0-{last}, parts of its names are {', '.join(parts)}".strip()


def text_model(model: nn.Module) -> nn.Module | None:
    """The text model inside a model that also takes images or sound; None if it is all text."""
    if not isinstance(model, PreTrainedModel) or model.config.get_text_config() is model.config:
        return None
    decoder = model.get_decoder()
    return None if decoder is None or decoder is model else decoder


def outside_linears(model: nn.Module) -> list[str]:
    """The linear layers that no text reaches: packed bases and fp8 leave them as they are."""
    away = set(map(id, outside_text(model).values()))
    every = model.named_modules()
    return [name for name, m in every if isinstance(m, nn.Linear) and id(m.weight) in away]


def outside_text(model: Any) -> dict[str, nn.Parameter]:
    """The parameters that no text reaches, by name: towers for images and sound."""
    decoder = text_model(model)
    if decoder is None:
        return {}
    reached = {id(parameter) for parameter in decoder.parameters()}
    for end in (model.get_output_embeddings(), model.get_input_embeddings()):
        reached |= set() if end is None else {id(parameter) for parameter in end.parameters()}
    return {name: p for name, p in model.named_parameters() if id(p) not in reached}
