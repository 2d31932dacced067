"""What adapters go on: names checked against the model, and the meaning of ``all-linear``.

peft's ``all-linear`` is every linear module. Three kinds of model need more care:

- mixture of experts: the experts are not modules but parameters of three dimensions, (experts, out,
  in). For some families peft adapts them and the router unasked, gate and up together at twice the
  rank, and loses linear layers of the same name; for others it leaves the experts out. Here every
  family gets the same: linear layers and experts at the recipe's rank, and the router stays. Where
  ``experts`` says whether they are adapted, every name is that of linear layers.
- gated delta rules: the small projections that only make decays and beta stay frozen.
- a text model with a vision tower: only the text model is adapted, unless ``vision`` is set.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from peft import LoraConfig, TaskType
from peft.tuners.tuners_utils import _check_lora_target_modules_mamba
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from trainkit.auto_class import ROUTERS
from trainkit.errors import ModelError, RecipeError
from trainkit.lora.read_weights import read_weights
from trainkit.models.frozen import text_model
from trainkit.models.linears import expert_parameters
from trainkit.models.proof.delta import gate_projections
from trainkit.models.scalar_head import NAME as SCALAR_HEAD
from trainkit.options.model import ALL_LINEAR, LoraOptions
from trainkit.options.section import ask, nearest
from trainkit.patterns import ends_in, refuse_endless


@dataclass(frozen=True)
class Targets:
    """What peft adapts."""

    modules: str | tuple[str, ...]
    parameters: tuple[str, ...] = ()
    split: tuple[str, ...] = ()
    """Those of ``parameters`` whose two halves have adapters of their own."""


_FIX = {
    "exclude_modules": "correct it, write a list of names such as [lm_head], or remove it",
    "target_modules": f"use {ALL_LINEAR!r} or a list of names such as [q_proj, v_proj]",
}


def resolve_and_check(model: PreTrainedModel, options: LoraOptions) -> Targets:
    """What peft adapts, held against every list of names and the sizes of the layers."""
    wanted, excluded = options.target_modules, options.exclude_modules
    names = [name for name, _ in model.named_modules()]
    patterns = {"target_modules": wanted, "exclude_modules": excluded}
    refuse_endless(patterns, names, "lora", ModelError)
    lists = {
        "exclude_modules": excluded or (),
        "modules_to_save": options.modules_to_save,
        "target_modules": () if wanted == ALL_LINEAR else wanted,
    }
    for key, listed in lists.items():  # peft only objects when no name at all matches
        if not isinstance(listed, str):
            check_names(key, listed, names)
        elif not any(re.fullmatch(listed, name) for name in names):
            raise ModelError(
                f"{key} {listed!r} matches no module (a string is a regular expression over full "
                "module names)",
                where=f"lora.{key}",
                fix=_FIX[key],
            )
    parameters = [name for name, _ in model.named_parameters()]
    check_names("target_parameters", options.target_parameters, parameters)
    targets = _targets(model, options)
    adapted = [each for each in parameters if ends_in(each, targets.parameters)]
    adapted += [
        each
        for each in names
        if targets.modules == ALL_LINEAR or is_targeted(each, targets.modules)
    ]
    check_names("rank_pattern", [*options.rank_pattern], adapted)
    _refuse_read_weights(model, targets, options)
    if targets.parameters:
        _refuse_with_parameters(targets, options)
    _refuse_rank(model, targets, options)
    return targets


def _targets(model: PreTrainedModel, options: LoraOptions) -> Targets:
    wanted, excluded = options.target_modules, options.exclude_modules
    listed = tuple(options.target_parameters)
    every_expert = expert_parameters(model)
    if options.experts in (True, "split") and not every_expert:
        raise ModelError(
            f"experts: {options.experts}, and the model has no experts with their weights in "
            "stacks",
            where="lora.experts",
            fix="remove it, or set it to auto",
        )
    has_them = options.experts in (True, "split", "auto" if wanted == ALL_LINEAR else True)
    experts = [name for name in every_expert if has_them and not is_named(name, excluded)]
    # experts.gate_up_proj: the last two parts of a name, which all layers share
    short = tuple(dict.fromkeys(".".join(name.split(".")[-2:]) for name in experts))
    parameters = tuple(dict.fromkeys((*listed, *short)))
    halves = _halves(model, experts) if options.experts == "split" else ()
    if wanted != ALL_LINEAR:
        return Targets(wanted if isinstance(wanted, str) else tuple(wanted), parameters, halves)
    linears = list(_linears(model, everywhere=options.vision))
    spared = {*read_weights(model), *_gate_projections(model)}
    names = [name for name in linears if name not in spared and _takes_adapter(model, name)]
    is_plain = names == linears and text_model(model) is None
    if is_plain and not every_expert and names:
        return Targets(ALL_LINEAR, listed)
    names = [name for name in names if not is_named(name, excluded)]
    if every_expert:
        names = [name for name in names if name.rpartition(".")[2] not in ROUTERS]
        if options.experts == "auto":
            names = [name for name in names if stays_a_module(model, name)]
    if not names and not experts:
        raise ModelError(
            "all-linear finds nothing to adapt", where="lora.target_modules", fix="name modules"
        )
    return Targets(tuple(names), parameters, halves)


def _halves(model: PreTrainedModel, experts: Sequence[str]) -> tuple[str, ...]:
    """The ends of the names of stacks that hold gate's rows, and then up's."""
    found = []
    for name in experts:
        owner, _, last = name.rpartition(".")
        module: Any = model.get_submodule(owner)
        if not getattr(module, "is_concatenated", False) or module.is_transposed:
            raise ModelError(
                f"experts: split, and {owner} does not hold gate above up",
                where="lora.experts",
                fix="set it to true: one adapter for both",
            )
        if last == "gate_up_proj" and module.has_gate:
            found.append(".".join(name.split(".")[-2:]))
    return tuple(dict.fromkeys(found))


def _refuse_read_weights(model: PreTrainedModel, targets: Targets, options: LoraOptions) -> None:
    """Refuse an adapter that would never act: its layer is passed by."""
    if targets.modules == ALL_LINEAR:
        return
    for name, holder in read_weights(model).items():
        if is_targeted(name, targets.modules) and not is_named(name, options.exclude_modules):
            raise ModelError(
                f"{name} cannot be adapted: {holder} multiplies by its weight itself, past the "
                "layer and what is put around it",
                where="lora.target_modules",
                fix=f"leave {name.rpartition('.')[2]} out, or use {ALL_LINEAR!r}, which does",
            )


def is_targeted(name: str, wanted: str | Sequence[str]) -> bool:
    """Whether peft adapts a module of this name: a pattern of the whole name, or names."""
    return bool(re.fullmatch(wanted, name)) if isinstance(wanted, str) else is_named(name, wanted)


def _refuse_rank(model: PreTrainedModel, targets: Targets, options: LoraOptions) -> None:
    """Refuse a rank that no layer of it can use: an update has its smaller dimension at most."""
    wanted = targets.modules
    shapes = [
        (min(module.in_features, module.out_features), name)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and (wanted == ALL_LINEAR or is_targeted(name, wanted))
        and not is_named(name, options.exclude_modules)
    ]
    for end, rank in {"": options.r, **options.rank_pattern}.items():
        fitting = (each for each in shapes if not end or ends_in(each[1], [end]))
        largest, name = max(fitting, default=(rank, ""))
        if not targets.parameters and not options.peft and rank > largest:
            raise RecipeError(
                f"a rank of {rank} is more than any adapted layer can use: an update of {name} has "
                f"rank {largest} at most",
                where=f"lora.rank_pattern.{end}" if end else "lora.r",
                fix=f"set it to {largest} or less (16 is usual), or train all weights without lora",
            )


def is_named(name: str, wanted: str | Sequence[str] | None) -> bool:
    """Whether a module, or one that it is part of, is named: a regular expression, or names."""
    if wanted is None:
        return False
    parts = name.split(".")
    prefixes = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    if isinstance(wanted, str):
        return any(re.fullmatch(wanted, prefix) for prefix in prefixes)
    return any(ends_in(prefix, wanted) for prefix in prefixes)


def _linears(model: PreTrainedModel, *, everywhere: bool) -> Iterator[str]:
    """Names of the linear layers, of the text model or everywhere, except the output layers."""
    heads = (model.get_output_embeddings(), getattr(model, SCALAR_HEAD, None))
    inside = None if everywhere else text_model(model)
    wanted = None if inside is None else set(inside.modules())
    for name, module in model.named_modules():
        is_linear = isinstance(module, nn.Linear | Conv1D) and module not in heads
        if is_linear and (wanted is None or module in wanted):
            yield name


def _gate_projections(model: PreTrainedModel) -> Iterator[str]:
    """Full names of the linear layers that only make the decays and the beta of a delta rule."""
    width = getattr(model.config.get_text_config(), "hidden_size", 0)
    for name, module in model.named_modules():
        yield from (f"{name}.{inside}" for inside in gate_projections(module, width))


def _takes_adapter(model: PreTrainedModel, name: str) -> bool:
    """Whether peft adapts it: where kernels of some recurrences are installed, they pass it by."""
    trial = LoraConfig(task_type=TaskType.CAUSAL_LM)
    try:
        _check_lora_target_modules_mamba(trial, model, name.rpartition(".")[2])
    except ValueError:
        return False
    return True


def stays_a_module(model: PreTrainedModel, name: str) -> bool:
    """Whether peft takes a name for the module that it names.

    In families whose experts were modules once, peft takes ``gate_proj`` for the experts' even
    where a layer of that name exists besides them (a shared expert, a dense first layer), also when
    it loads the adapter. Where experts are ``auto``, the report names such a layer.
    """
    from peft.utils import transformers_weight_conversion as conversion

    trial = LoraConfig(task_type=TaskType.CAUSAL_LM, target_modules=[copy.copy(name)])
    try:
        conversion.convert_peft_config_for_transformers(trial, model, None)
    except ValueError:  # "cannot convert gate_proj without up_proj"
        return False
    return trial.target_modules == {name}


def check_names(key: str, wanted: Sequence[str], names: Sequence[str]) -> None:
    """Refuse a name that is the end of no full name."""
    for item in wanted:
        if not any(ends_in(name, [item]) for name in names):
            lasts = {name.rpartition(".")[2] for name in names if name}
            known = sorted(last for last in lasts if not last.isdigit())
            hint = ask(nearest(item, known))
            raise ModelError(
                f"{key}: nothing is called {item!r}",
                where=f"lora.{key}",
                fix=f"{f'{hint} ' if hint else ''}the names in this model are {', '.join(known)}",
            )


def _refuse_with_parameters(targets: Targets, options: LoraOptions) -> None:
    """What peft's adapters of parameters cannot do."""
    for key, value, off in (
        ("peft", options.peft, "{}"),
        ("lora_bias", options.lora_bias, "false"),
        ("use_dora", options.use_dora, "false"),
    ):
        if value:
            raise RecipeError(
                f"{key}: {value} cannot be used on parameters, and {', '.join(targets.parameters)} "
                "are not modules",
                where=f"lora.{key}",
                fix=f"set lora.{key}: {off}, or leave the experts out: experts: false",
            )
