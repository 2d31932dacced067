"""Which linear layers could run in fp8, in groups that are chosen together.

A group is one role (the last part of the layers' names: q_proj, down_proj) in one part of the
depth. The first and the last layer stand alone, since they are the most sensitive ones; what is
between them is cut into equal parts.
"""

import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.conv import _ConvNd
from transformers.pytorch_utils import Conv1D

from trainkit.errors import ModelError
from trainkit.kernels.fp8.function import fits_fp8
from trainkit.models.linears import ROUTERS
from trainkit.models.swap import plain_class
from trainkit.options.model import Fp8Options
from trainkit.options.section import ask, nearest
from trainkit.parallel.parameters import whole_shape

_PARTS_BETWEEN = 5
OUTSIDE = "weights outside linear layers, as of experts"
"""Why those keep 16 bits."""
_DEPTH = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class Group:
    """Layers that are chosen together.

    Attributes:
        label: for people: ``down_proj of layers 1-6``.
        layers: their names.
    """

    label: str
    layers: tuple[str, ...]


@dataclass(frozen=True)
class Candidates:
    """The linear layers of a model.

    Attributes:
        layers: those that could run in fp8, by name.
        kept: why the others cannot, and how many there are.
        head: the output layer, if it is one of them.
    """

    layers: Mapping[str, nn.Linear]
    kept: Mapping[str, int]
    head: str = ""


def find_candidates(
    model: nn.Module, options: Fp8Options, *, frozen: bool = False, whole: Collection[str] = ()
) -> Candidates:
    """Look at every linear layer.

    Args:
        model: as it was loaded.
        options: which to leave out.
        frozen: of a base under adapters; else layers that are not trained keep 16 bits.
        whole: modules that train next to the adapters over a frozen base, by their names' ends.

    Raises:
        ModelError: a name in ``skip`` is no layer's, or no layer is left.
    """
    get_head = getattr(model, "get_output_embeddings", None)
    head = None if get_head is None else get_head()
    layers: dict[str, nn.Linear] = {}
    kept: dict[str, int] = {}
    unused, names = dict.fromkeys(options.skip), []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or plain_class(module) is not nn.Linear:
            if number := _num_other_matrices(module):
                kept[OUTSIDE] = kept.get(OUTSIDE, 0) + number
            continue
        names.append(name)
        skipped = [part for part in options.skip if f".{part}." in f".{name}."]
        for part in skipped:
            unused.pop(part, None)
        reason = "named in skip" if skipped else _why_not(name, module, head, options, frozen)
        if any(name == each or name.endswith(f".{each}") for each in whole):
            reason = "trained whole (modules_to_save)"
        if reason:
            kept[reason] = kept.get(reason, 0) + 1
        else:
            layers[name] = module
    if unused:
        raise ModelError(
            f"no linear layer of the model has {', '.join(unused)} in its name",
            where="model.fp8.skip",
            fix=_meant(next(iter(unused)), names),
        )
    if not layers:
        reasons = "; ".join(f"{number}: {reason}" for reason, number in kept.items())
        raise ModelError(
            f"no linear layer can run in fp8 ({reasons or 'there is none'})",
            where="lora.quantize" if frozen else "model.fp8",
            fix=f"remove {'lora.quantize' if frozen else 'model.fp8'}",
        )
    of_head = next((name for name, module in layers.items() if module is head), "")
    return Candidates(layers, kept, of_head)


def _num_other_matrices(module: nn.Module) -> int:
    """How many weights of a module multiply, though it is no linear layer."""
    if isinstance(module, _ConvNd):
        return 0
    fewest = 2 if isinstance(module, Conv1D) else 3
    return sum(len(whole_shape(one)) >= fewest for one in module.parameters(recurse=False))


def _meant(part: str, names: Iterable[str]) -> str:
    roles = {name.rpartition(".")[2] for name in names}
    other = "give names as in the model's weights, or parts between dots, as layers.0"
    return ask(nearest(part, sorted(roles))) or other


def _why_not(
    name: str, layer: nn.Linear, head: nn.Module | None, options: Fp8Options, frozen: bool
) -> str:
    """Why a layer keeps 16 bits; empty where it need not."""
    if layer is head and options.head == "bf16":
        return "the output layer"
    if name.rpartition(".")[2] in ROUTERS:
        return "chooses experts"
    if not frozen and not layer.weight.requires_grad:
        return "not trained"
    if not fits_fp8(layer.out_features, layer.in_features):
        return "the tensor cores take multiples of 16 only"
    if min(layer.out_features, layer.in_features) < options.min_size:
        return f"narrower than min_size {options.min_size}"
    return ""


def group_layers(names: Iterable[str]) -> list[Group]:
    """Roles by parts of the depth, in the order of the names."""
    names = list(names)
    depths = {name: _depth_of(name) for name in names}
    parts = _parts(sorted({depth for depth in depths.values() if depth is not None}))
    found: dict[str, list[str]] = {}
    for name in names:
        role, depth = name.rpartition(".")[2], depths[name]
        label = name
        if depth is not None:
            part = next(part for part in parts if depth in part)
            label = f"{role} of layer{'' if len(part) == 1 else 's'} {_span(part)}"
        found.setdefault(label, []).append(name)
    return [Group(label, tuple(layers)) for label, layers in found.items()]


def _depth_of(name: str) -> int | None:
    match = _DEPTH.search(f"{name}.")
    return None if match is None else int(match.group(1))


def _parts(depths: Sequence[int]) -> list[Sequence[int]]:
    """The first, the last, and equal parts of what is between them."""
    if len(depths) <= 2:
        return [[depth] for depth in depths]
    between = depths[1:-1]
    number = min(_PARTS_BETWEEN, len(between))
    cuts = [len(between) * i // number for i in range(number + 1)]
    middle = [between[a:b] for a, b in itertools.pairwise(cuts)]
    return [depths[:1], *middle, depths[-1:]]


def _span(part: Sequence[int]) -> str:
    return str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}"
