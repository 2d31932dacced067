"""Attach, load and describe LoRA adapters: peft's own, configured by a recipe's ``lora:``.

The result is an ordinary ``peft.PeftModel``. It saves, reloads and merges as peft does; trainkit
adds the checks that peft leaves out (a target that matches nothing, tied weights trained apart)
and keeps the base model in its own dtype (nothing is upcast, quantised or not).
"""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import torch
from peft import PeftConfig, PeftModel, PeftType, TaskType, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.lora import LoraLayer
from peft.utils import transformers_weight_conversion as weight_conversion
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from trainkit.auto_class import refuse_scalar_head
from trainkit.checkpoint.weights.adapter import check_scaling, read_by_peft
from trainkit.errors import CheckpointError, RecipeError
from trainkit.evaluation_mode import changed
from trainkit.lora.initial import start_from_base
from trainkit.lora.targets import Targets, resolve_and_check, stays_a_module
from trainkit.models.packed_experts import read_where_they_run, with_shapes
from trainkit.models.scalar_head import has_scalar_head
from trainkit.models.swap import subclass_of
from trainkit.models.vocabulary import vocabulary_ends
from trainkit.options import LoraOptions
from trainkit.patterns import ends_in, refuse_endless
from trainkit.places import refuse_duplicates, regular_files

_UNMATCHED = r"The following \w+_pattern keys did not match"
_PEFT_NAMES = {"alpha": "lora_alpha", "dropout": "lora_dropout"}
_SHARED = ("target_modules", "exclude_modules", "modules_to_save")


class _Sorted:
    """Written the same by every process: sets of names have another order in each."""

    def to_dict(self: Any) -> dict[str, Any]:
        """As peft does, with sets in order."""
        values: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        return {key: sorted(v) if isinstance(v, set) else v for key, v in values.items()}


def to_peft(options: LoraOptions, targets: Targets, *, tied: bool = False) -> PeftConfig:
    """Build peft's configuration: every key of ``lora:`` that peft has goes there."""
    more = dict(options.peft)
    kind = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(str(more.pop("peft_type", "lora")).upper())]
    config: Any = subclass_of(kind, _Sorted)  # which can be pickled
    own = {field.name for field in fields(kind)}
    given = {_PEFT_NAMES.get(key, key): value for key, value in options}
    given = {name: None if value == [] else value for name, value in given.items() if name in own}
    modules = targets.modules
    given |= {
        "target_modules": modules if isinstance(modules, str) else list(modules),
        "target_parameters": list(targets.parameters) or None,
        "lora_dropout": 0.0 if targets.parameters else options.dropout,
        # What takes the base apart is done after the adapters have their dtype.
        "init_lora_weights": options.changes_base or options.init_lora_weights,
    }
    missing = {n: options.r for n in targets.split if n not in options.rank_pattern}
    ranks, alphas = {}, {}  # by patterns of ends of names; the first that fits counts
    for name, rank in {**options.rank_pattern, **missing}.items():
        both = any(ends_in(a, [b]) for end in targets.split for a, b in ((name, end), (end, name)))
        times = 2 if both else 1  # A and B of two layers in one, at the scale of one
        ranks[re.escape(name)] = rank * times
        grown = times**0.5 if options.use_rslora else times
        alphas[re.escape(name)] = options.alpha * rank / options.r * grown
    given |= {"rank_pattern": ranks, "alpha_pattern": alphas}
    given = copy.deepcopy(given)  # peft writes into lists, and these are the recipe's
    if not options.peft:
        return config(**given, ensure_weight_tying=tied, task_type=TaskType.CAUSAL_LM)
    shared = {name: given.pop(name) for name in _SHARED if name in own}
    own -= {field.name for field in fields(PeftConfig)} | {*_SHARED}
    if strange := sorted(more.keys() - own):
        raise RecipeError(
            f"{strange[0]} is no key of peft's {kind.__name__}",
            where="lora.peft",
            fix=f"it has {', '.join(sorted(own))}",
        )
    return config(**shared, **more, task_type=TaskType.CAUSAL_LM)


def attach(
    model: PreTrainedModel, options: LoraOptions, *, require_input_grads: bool = False
) -> PeftModel:
    """Put fresh adapters on a model and freeze the rest.

    The base keeps its dtype: unlike ``peft.prepare_model_for_kbit_training`` this upcasts neither
    norms nor embeddings, so a 4-bit base costs what it should.

    Args:
        model: the base, quantised or not. It is changed in place (peft's way).
        options: what to adapt.
        require_input_grads: let gradients reach the embeddings' output. Reentrant gradient
            checkpointing trains nothing without it; other set-ups waste a matmul on it.
    """
    with with_shapes(model):
        targets = resolve_and_check(model, options)
    in_float32 = options.adapter_dtype == "float32"
    if targets.parameters:  # peft looks for their patterns among modules only, and says so
        warnings.filterwarnings("ignore", _UNMATCHED)
    try:
        config = to_peft(options, targets, tied=_trains_tied_weights(model, options))
        given = {"revision": getattr(model.config, "_commit_hash", None)}  # of a hub's base
        with with_shapes(model), _of_layers(options.experts != "auto"):
            wrapped = get_peft_model(model, config, autocast_adapter_dtype=in_float32, **given)
    except (ValueError, TypeError, NotImplementedError) as error:
        # peft refuses combinations of its options in these ways.
        raise RecipeError(
            f"peft cannot attach such an adapter: {error}",
            where="lora",
            fix="take what the message names out of lora.target_modules (all-linear leaves it "
            "out), or change that key of lora",
        ) from error
    if not in_float32:
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(model.dtype)
    if options.changes_base:
        start_from_base(
            wrapped, str(options.init_lora_weights), dtype=None if in_float32 else model.dtype
        )
    stacks = {name.rpartition(".")[2] for name in targets.split}
    for module in wrapped.modules():
        if getattr(module, "parameter_name", None) in stacks:
            _keep_apart(module, options.init_lora_weights)
    if options.experts != "auto":
        _name_by_weights(wrapped)
    if targets.parameters:
        drop_inputs(wrapped, options)
    read_where_they_run(wrapped)
    # A run has a card of its own; to fill in peft's takes longer than to write the adapter.
    vars(wrapped)["create_or_update_model_card"] = str  # of the folder: nothing
    if require_input_grads:
        wrapped.enable_input_require_grads()
    return wrapped


def drop_inputs(model: PeftModel, options: LoraOptions) -> None:
    """Give adapters their dropout, of which peft makes none where some are of parameters."""
    for at, module in model.named_modules():
        full = f"{at.replace('.base_layer', '')}.{getattr(module, 'parameter_name', '')}"
        if isinstance(module, LoraLayer) and not ends_in(full, options.target_parameters):
            for name in module.lora_dropout if options.dropout else ():
                module.lora_dropout[name] = nn.Dropout(options.dropout)


class _Apart(nn.Module):
    """B of two layers in one: of the first half of the ranks the first half of the outputs.

    The other two blocks of the parameter begin as zeros, get no gradient and stay zeros.
    """

    halves: ClassVar[int] = 2

    @property
    def weight(self) -> torch.Tensor:
        whole = self._parameters["weight"]
        assert whole is not None
        if whole.dim() < 2 or hasattr(whole, "to_local"):  # a part, which its engine looks up here
            return whole
        rows, columns = (size // 2 for size in whole.shape)
        return torch.block_diag(whole[:rows, :columns], whole[rows:, columns:])


def _keep_apart(layer: Any, init: bool | str) -> None:
    """Give the two halves of a stack adapters of their own, as linear layers begin with."""
    (name,) = layer.lora_B
    layer.lora_B[name].__class__ = subclass_of(nn.Linear, _Apart)
    if init == "gaussian":  # whose deviation is 1 / r, and peft's r is of both
        layer.lora_A[name].weight.data.mul_(2)


def _of_layers(alone: bool) -> AbstractContextManager[None]:
    """Within, where so, peft takes no name of linear layers for the experts'."""
    rename = (weight_conversion, "convert_peft_config_for_transformers", lambda *_, **__: None)
    return changed([rename] if alone else [])


def _name_by_weights(model: PeftModel) -> None:
    """Name by their weights the layers whose own names peft takes for the experts'.

    So it loads the saved adapter as it was trained, whether with this package or without it.
    """
    base, tuner = model.get_base_model(), model.base_model
    config: Any = next(iter(model.peft_config.values()))
    if config.peft_type != PeftType.LORA:
        return
    names, wanted = list(tuner.targeted_module_names), config.target_modules
    wanted = names if isinstance(wanted, str) else wanted
    taken = [f"{name}.weight" for name in names if not stays_a_module(base, name)]
    config.target_modules = {name for name in wanted if stays_a_module(base, name)}
    config.target_parameters = sorted({*(config.target_parameters or ()), *taken}) or None
    if taken:
        config.lora_dropout = 0.0  # with which peft loads no parameter's
    for pattern in (config.rank_pattern, config.alpha_pattern) if taken else ():
        pattern |= {key.removesuffix(r"\.weight") + r"\.weight": pattern[key] for key in pattern}


def _weights_of_layers(model: PreTrainedModel, config: Any) -> bool:
    """Name the linear layers that are named by their weights as layers; whether there are any."""
    linears = {f"{n}.weight" for n, each in model.named_modules() if isinstance(each, nn.Linear)}
    parameters = getattr(config, "target_parameters", None) or ()
    found = {each for each in parameters if any(ends_in(name, [each]) for name in linears)}
    if found and not isinstance(config.target_modules, str):
        config.target_modules = {*(config.target_modules or ()), *(n[:-7] for n in found)}
        config.target_parameters = sorted({*parameters} - found) or None
    return bool(found)


def with_vocabulary(options: LoraOptions, model: PreTrainedModel) -> LoraOptions:
    """The same, with embedding and head trained whole, as they must be where tokens were added."""
    ends = vocabulary_ends(model)
    _refuse_targets(options, ends, "with model.add_tokens")
    saved = options.modules_to_save
    missing = [end for end in ends if not ends_in(end, saved)]
    return options.replace(modules_to_save=[*saved, *(e.rpartition(".")[2] for e in missing)])


def load_adapter(
    model: PreTrainedModel, directory: str | Path, *, trainable: bool = False
) -> PeftModel:
    path = Path(directory)
    if not (path / "adapter_config.json").is_file():
        raise CheckpointError(
            "no adapter_config.json here, so this is not an adapter",
            where=str(path),
            fix="give the directory that a LoRA run saved (final/ or checkpoint-N/)",
        )
    regular_files(path, CheckpointError)
    # Patterns that never end and scales that are not finite; the rest peft says.
    file = path / "adapter_config.json"
    try:
        config = json.loads(file.read_bytes(), object_pairs_hook=refuse_duplicates)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"it is not valid JSON: {error}", where=str(file)) from None
    if isinstance(config, dict):
        if not has_scalar_head(model):
            refuse_scalar_head([str(config.get("task_type"))], str(path))
        check_scaling(config, path)
        names = (name for name, _ in model.named_modules())
        refuse_endless(config, names, file)
    with read_by_peft(path):
        given: Any = PeftConfig.from_pretrained(str(path))
        layers = _weights_of_layers(model, given)
        with warnings.catch_warnings(record=True) as said, with_shapes(model), _of_layers(layers):
            warnings.simplefilter("always")
            warnings.filterwarnings("ignore", _UNMATCHED)
            wrapped = PeftModel.from_pretrained(model, path, is_trainable=trainable, config=given)
    if layers:
        _name_by_weights(wrapped)
    read_where_they_run(wrapped)
    _refuse_parts(path, wrapped, [str(each.message) for each in said])
    for each in {str(each.message): each for each in said}.values():  # of every layer the same
        warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    return wrapped


def _refuse_parts(path: Path, model: PeftModel, said: Sequence[str]) -> None:
    """Refuse weights and a configuration that are not of one adapter; peft takes what fits."""
    missing = next((each for each in said if "missing adapter keys" in each), None)
    wrong = "" if missing is None else "adapted modules have no weights in it"
    file = path / "adapter_model.safetensors"
    if file.is_file():
        with safe_open(file, "pt") as tensors:
            held = sum(".lora_A." in f".{name}." for name in list(tensors.keys()))
        taken = sum(".lora_A." in f"{name}." for name, _ in model.named_parameters())
        if held > taken:
            wrong = f"it has weights of {held} modules, and its configuration adapts {taken}"
    if wrong:
        named = re.findall(r"'([^']+)\.lora_", missing or "")
        raise CheckpointError(
            f"a part of the adapter would be ignored: {wrong}"
            + (f": {named[0].removeprefix('base_model.model.')}" if named else ""),
            where=str(path),
            fix="take adapter_config.json and adapter_model.safetensors of the same adapter, whole",
        )


def _trains_tied_weights(model: PreTrainedModel, options: LoraOptions) -> bool:
    """Whether a tied embedding trains whole, so that peft must keep both ends one.

    An adapter is on its own end only, and merging it unties the two. peft would tie the adapters of
    both ends as views of one storage, which the first change of dtype or device takes apart.
    """
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embeddings.weight:
        return False
    ends = [name for name, module in model.named_modules() if module in (head, embeddings)]
    if not any(ends_in(end, options.modules_to_save) for end in ends):
        return False
    _refuse_targets(options, ends, "with its other end (lora.modules_to_save)")
    return True


def _refuse_targets(options: LoraOptions, ends: Iterable[str], why: str) -> None:
    """Stop where adapters are asked for on an end of the vocabulary that trains whole."""
    targets = options.target_modules
    ends = [*ends]
    refuse_endless({"target_modules": targets}, ends, "lora", RecipeError)
    for end in ends:
        is_wanted = isinstance(targets, str) and re.fullmatch(targets, end)
        if is_wanted or (not isinstance(targets, str) and ends_in(end, targets)):
            raise RecipeError(
                f"lora.target_modules names {end}, which trains whole {why}",
                where="lora.target_modules",
                fix=f"take {end} out of it",
            )
