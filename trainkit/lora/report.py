"""What of a model is adapted, and what is quantised, kind by kind, for people and programs."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn

from trainkit.models.linears import expert_parameters, kind_of, num_weights
from trainkit.parallel.parameters import num_elements

_LAYER = re.compile(r"\.\d+(?=\.)")


def describe_adapters(model: nn.Module) -> dict[str, Any]:
    """What is adapted, by kind: a module's or parameter's name without its layer's number.

    Returns:
        ``adapted``: a list of {kind, what ("module" or "parameter"), number, r, scaling};
        ``trained_whole``: the kinds of modules that train in full next to them, each with its
        number; ``not_adapted``: the kinds of linear layers and expert weights without an adapter;
        ``unmergeable``: the kinds whose adapters have a bias that the base has no place for;
        ``storage``: for each dtype that the frozen base is kept in ("nf4"
        included) {weights, gib}.
    """
    adapted: dict[tuple[Any, ...], int] = defaultdict(int)
    covered: set[int] = set()
    unmergeable: dict[str, int] = defaultdict(int)
    modules = dict(model.named_modules())
    for name, layer in modules.items():
        if not isinstance(layer, BaseTunerLayer):
            continue
        parameter = getattr(layer, "parameter_name", None)
        base = layer.get_base_layer()
        covered.add(id(base) if parameter is None else id(layer.get_param()))
        (adapter,) = layer.active_adapters
        kind = _kind(name) if parameter is None else f"{_kind(name)}.{parameter}"
        what = "module" if parameter is None else "parameter"
        if not isinstance(layer, LoraLayer):
            adapted[kind, what, type(layer).__module__.split(".")[2], 1.0] += 1
            continue
        adapted[kind, what, layer.r[adapter], layer.scaling[adapter]] += 1
        if layer.lora_bias[adapter] and getattr(base, "bias", None) is None:
            unmergeable[kind] += 1
    trained_whole: dict[str, int] = defaultdict(int)
    for name, wrapper in modules.items():
        if isinstance(wrapper, ModulesToSaveWrapper):
            trained_whole[_kind(name)] += 1
            covered |= {id(module) for module in wrapper.modules()}  # copy and original
    return {
        "adapted": [
            {"kind": kind, "what": what, "number": number, "r": lora_rank, "scaling": scaling}
            for (kind, what, lora_rank, scaling), number in adapted.items()
        ],
        "trained_whole": dict(trained_whole),
        "not_adapted": _not_adapted(modules, covered),
        "unmergeable": dict(unmergeable),
        "storage": _storage(model),
    }


def adapter_lines(report: dict[str, Any]) -> list[str]:
    """The same in a few lines for the console."""
    lines = []
    for what in ("module", "parameter"):
        rows = [row for row in report["adapted"] if row["what"] == what]
        kinds = ", ".join(
            f"{row['kind']} x{row['number']} ({'r ' * isinstance(row['r'], int)}{row['r']})"
            for row in rows
        )
        lines += [f"adapted {what}s: {kinds}"] if rows else []
    for what, title in (("trained_whole", "trained whole"), ("not_adapted", "not adapted")):
        kinds = ", ".join(f"{kind} x{number}" for kind, number in report[what].items())
        lines += [f"{title}: {kinds}"] if kinds else []
    stored = report["storage"].items()
    lines.append(
        "frozen base: " + ", ".join(f"{at['gib']:.2f} GiB in {name}" for name, at in stored)
    )
    return lines


def merge_warning(report: dict[str, Any]) -> str | None:
    """What to know before training of adapters that no merge can put into the base; or None."""
    if not report["unmergeable"]:
        return None
    kinds = ", ".join(f"{kind} x{number}" for kind, number in report["unmergeable"].items())
    return (
        f"lora.lora_bias: the base has no bias in {kinds}, so what is trained can be used as an "
        "adapter, and neither merged nor exported; without lora_bias it can"
    )


def _kind(name: str) -> str:
    """``model.layers.3.mlp.experts`` is of the kind ``mlp.experts``."""
    name = name.replace(".base_layer", "")
    found = list(_LAYER.finditer(name))
    tail = name[found[0].end() + 1 :] if found else name.removeprefix("base_model.model.")
    return _LAYER.sub("", tail)


def _not_adapted(modules: dict[str, nn.Module], covered: set[int]) -> dict[str, int]:
    """Linear layers, routers and expert weights that carry no adapter."""
    left: dict[str, int] = defaultdict(int)
    for name, module in modules.items():
        is_router = name.endswith((".router", ".gate")) and not isinstance(module, BaseTunerLayer)
        if ".lora_" not in name and (isinstance(module, nn.Linear) or is_router):
            left[_kind(name)] += id(module) not in covered
    for name, parameter in expert_parameters(modules[""]).items():
        left[_kind(name)] += id(parameter) not in covered
    return {kind: number for kind, number in left.items() if number}


def _storage(model: nn.Module) -> dict[str, dict[str, Any]]:
    """How the frozen weights are kept; packed weights are counted as what they stand for."""
    kinds = {
        id(module.weight): found.name
        for module in model.modules()
        if (found := kind_of(module)) is not None and found.packs
    }
    totals: dict[str, dict[str, Any]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            continue
        kind = kinds.get(id(parameter), str(parameter.dtype).removeprefix("torch."))
        if (state := getattr(parameter, "quant_state", None)) is not None:  # experts' too
            kind = getattr(state, "kind", "nf4")
        total = totals.setdefault(kind, {"weights": 0, "gib": 0.0})
        total["weights"] += num_weights(parameter)
        total["gib"] += num_elements(parameter) * parameter.element_size() / 2**30
    return totals
