"""Rotary attention: the function that turns queries and keys, replaced where a class calls it.

Hugging Face's attention finds ``apply_rotary_pos_emb`` as a global of its module. The class gets a
copy of its methods with another global, so caches, masks, q-norms, sinks and gates stay its own.

Models differ in how the angles lie, which way they turn, which columns pair up and where the heads
are; five choices name every variant there is.

Shapes: B batch, S sequence, D head size.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainkit import kernels
from trainkit.models.proof.compare import (
    EXACT,
    Truth,
    decisions,
    draw,
    relative,
    share_of_other_bits,
)
from trainkit.models.proof.forward import Finding
from trainkit.models.proof.source import methods, names_in

_ANGLES = {"cos", "sin", "freqs_cis", "freqs", "position_ids", "sinusoidal_pos"}


class Turn(NamedTuple):
    """One variant.

    Attributes:
        angles: "" for each angle twice, in halves; "half": each once; "paired": in neighbours.
        sign: -1 turns back.
        interleaved: neighbours are a pair, else halves.
        unpairs: the columns are sorted from neighbours into halves first.
        heads: the axis of the heads.
    """

    angles: str = ""
    sign: int = 1
    interleaved: bool = False
    unpairs: bool = False
    heads: int = 1

    def __str__(self) -> str:
        parts = [
            "neighbours" if self.interleaved else "halves",
            "sorted first" if self.unpairs else "",
            f"{self.angles} angles" if self.angles else "",
            "turned back" if self.sign < 0 else "",
            "heads last but one" if self.heads == 2 else "",
        ]
        return ", ".join(part for part in parts if part)


def turns() -> Iterator[Turn]:
    """Every variant, the usual ones first."""
    for unpairs, sign, heads, angles, interleaved in itertools.product(
        (False, True), (1, -1), (1, 2), ("", "half", "paired"), (False, True)
    ):
        yield Turn(angles, sign, interleaved, unpairs, heads)


def kernel_for(function: FunctionType, turn: Turn) -> Callable[..., Any]:
    """``apply_rope`` behind the signature of one of Hugging Face's functions.

    Single tokens without gradients take the function itself; see `KernelForward`.
    """
    signature = inspect.signature(function)
    names = list(signature.parameters)
    if turn == Turn(interleaved=turn.interleaved) and names[:4] == ["q", "k", "cos", "sin"]:
        interleaved = turn.interleaved

        def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: Any, **more: Any) -> Any:
            if q.shape[2] == 1 and not torch.is_grad_enabled():
                return function(q, k, cos, sin, *others, **more)
            return kernels.apply_rope(q, k, cos, sin, interleaved=interleaved)

        return apply

    def apply_any(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        states = [
            value
            for name, value in given.items()
            if isinstance(value, Tensor) and name not in _ANGLES
        ]
        if states[0].shape[3 - turn.heads] == 1 and not torch.is_grad_enabled():
            return function(*args, **kwargs)
        cos, sin = _angles(given, turn)
        if turn.heads == 2:
            states = [each.transpose(1, 2) for each in states]
        if turn.unpairs:
            states = [each.unflatten(-1, (-1, 2)).mT.flatten(-2) for each in states]
        turned = kernels.apply_rope(states[0], states[-1], cos, sin, interleaved=turn.interleaved)
        if turn.heads == 2:
            turned = (turned[0].transpose(1, 2), turned[1].transpose(1, 2))
        return turned if len(states) == 2 else turned[0]

    return apply_any


def _angles(given: dict[str, Any], turn: Turn) -> tuple[Tensor, Tensor]:
    """Cosines and sines, (B or 1, S, R)."""
    if "cos" in given:
        pair = [given["cos"], given["sin"]]
    else:
        turned: Any = given.get("freqs_cis", given.get("freqs"))
        pair = [turned.real, turned.imag]
    cos, sin = (_in_rows(each, turn) for each in pair)
    return cos, sin if turn.sign > 0 else -sin


def _in_rows(table: Tensor, turn: Turn) -> Tensor:
    for axis in (turn.heads, 1, 2):
        if table.dim() > 3 and table.shape[axis] == 1:
            table = table.squeeze(axis)
    table = table[None] if table.dim() == 2 else table
    if turn.angles == "half":
        return torch.cat([table, table], -1)
    return torch.cat([table[..., ::2]] * 2, -1) if turn.angles == "paired" else table


def turning_functions(kind: type[nn.Module]) -> dict[str, FunctionType]:
    """The globals that a class's code calls with angles, by name."""
    found: dict[str, FunctionType] = {}
    for _, method in methods(kind):
        inner = inspect.unwrap(method)
        for name in names_in(inner.__code__):
            called = inner.__globals__.get(name)
            if not isinstance(called, FunctionType) or called.__module__.startswith("torch"):
                continue
            parameters = set(inspect.signature(called).parameters)
            if {"cos", "sin"} <= parameters or ("rot" in name and parameters & _ANGLES):
                found[name] = called
    return found


def find_turn(function: FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Finding:
    """Which variant a function is, on the angles that it was called with.

    Returns:
        On, with ``turn`` in its settings, or why it is none.
    """
    flat = [*args, *kwargs.values()]
    names = [*list(inspect.signature(function).parameters)[: len(args)], *kwargs]
    places = [i for i, each in enumerate(flat) if _is_states(each) and names[i] not in _ANGLES]
    wide = [_wide(each) for each in flat]
    inputs = [draw(*flat[i].shape, seed=i).to(flat[i].device) for i in places]

    def on(f: Callable[..., Any], base: list[Any]) -> Callable[..., Any]:
        def call(*states: Tensor) -> Any:
            full = list(base)
            for i, each in zip(places, states, strict=True):
                full[i] = each
            named = dict(zip(kwargs, full[len(args) :], strict=True))
            return f(*full[: len(args)], **named)

        return call

    if found := decisions(function):
        return Finding("rope", "refused", f"{function.__name__} decides by {found[0]}")
    truth = Truth(on(function, wide), inputs, ())
    nearest = truth.error or (float("inf"), "")
    for turn in () if truth.error else turns():
        ours = kernel_for(function, turn)
        error = truth.against(on(ours, wide))
        if error[0] < EXACT and (turn.angles or turn.interleaved or _repeats(wide, inputs)):
            low = [_low(each) for each in flat]
            x16 = [each.to(torch.bfloat16) for each in inputs]
            share = share_of_other_bits(on(function, low), on(ours, low), x16)
            settings = {"turn": turn}
            return Finding("rope", "on", str(turn), error[0], share, None, settings)
        nearest = min(nearest, error, key=lambda each: each[0])
    reason = f"no variant fits, the nearest is off by {nearest[0]:.0e} {nearest[1]}".strip()
    return Finding("rope", "refused", reason)


def _repeats(flat: list[Any], inputs: list[Tensor]) -> bool:
    """Whether the second half of the angles repeats the first, as the kernel takes for granted."""
    tables = [each for each in flat if isinstance(each, Tensor) and not _is_states(each)]
    tables = [each for each in tables if each.is_floating_point()]
    return all(
        relative(*reversed(each.chunk(2, -1))) == 0.0 for each in tables if each.shape[-1] % 2 == 0
    )


def _is_states(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 4


def _wide(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    if value.is_complex():
        return value.to(torch.complex128)
    return value.double() if value.is_floating_point() else value


def _low(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().to(torch.bfloat16)
    return value.detach() if isinstance(value, Tensor) else value
