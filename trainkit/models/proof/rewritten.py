"""Modules that run Hugging Face's own forward with a few calls replaced.

Attention: the turning function is the kernel, and linear layers that read one input are read
together. A decoder layer: an addition and the norm after it are one pass. All else stays as it is
written: caches, masks, windows, dropout, multipliers, what a release adds.

Rotary attention: the function that turns queries and keys, replaced where a class calls it.

Hugging Face's attention finds ``apply_rotary_pos_emb`` as a global of its module. The class gets a
copy of its methods with another global, so caches, masks, q-norms, sinks and gates stay its own.

Models differ in how the angles lie, which way they turn, which columns pair up and where the heads
are; five choices name every variant there is.

Shapes: B batch, S sequence, D head size.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from trainkit import kernels
from trainkit.models.proof.compare import (
    Finding,
    Truth,
    decisions,
    draw,
    first_fit,
    relative,
    share_of_other_bits,
)
from trainkit.models.proof.norms import NormSettings
from trainkit.models.proof.source import (
    edited,
    join_linears,
    join_norms,
    methods,
    names_in,
    redirected,
)
from trainkit.models.shared_input import apply_linears
from trainkit.models.swap import KernelForward

_IN_PLACE = re.compile(r"[a-z][a-z0-9_]*[a-z0-9]_")


class JoinedNorm(NamedTuple):
    """A norm that takes an addition in."""

    name: str
    kind: type[nn.Module]
    made: NormSettings


class Rewritten(KernelForward):
    """Hugging Face's methods with what the class attributes say replaced.

    Attributes:
        linears: linear layers that may be read together where the source reads one variable.
        read_together: the groups of ``linears`` that are.
        joined: the names of ``norms`` that do.
    """

    turning: ClassVar[tuple[tuple[str, Turn], ...]] = ()
    linears: ClassVar[tuple[str, ...]] = ()
    norms: ClassVar[tuple[JoinedNorm, ...]] = ()
    read_together: ClassVar[tuple[tuple[str, ...], ...]] = ()
    joined: ClassVar[tuple[str, ...]] = ()
    changes_in_place: ClassVar[bool] = False
    """Whether a method that reads layers together writes into tensors, perhaps into theirs."""
    _norms: ClassVar[Mapping[str, JoinedNorm]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Something else may lie on a class that is made already.
        if len(cls.__bases__) == 2 and cls.__bases__[0] is Rewritten:
            cls._rewrite(cls.__bases__[1])
        super().__init_subclass__(**kwargs)  # transformers wraps a layer's forward, then

    @classmethod
    def _rewrite(cls, below: type[nn.Module]) -> None:
        cls._norms = {norm.name: norm for norm in cls.norms}
        functions = turning_functions(below)
        names = {name: kernel_for(functions[name], turn) for name, turn in cls.turning}
        for name, called in methods(below):
            method: Any = called
            used = names_in(inspect.unwrap(method).__code__)
            # What checkpoints the layer below is not the outermost any more.
            while method.__code__.co_name == "forward_with_checkpointing":
                method = method.__wrapped__
            groups: list[tuple[str, ...]] = []
            joined: list[str] = []

            def edit(
                definition: ast.FunctionDef,
                groups: list[tuple[str, ...]] = groups,
                joined: list[str] = joined,
            ) -> None:
                groups += join_linears(definition, cls.linears)
                joined += join_norms(definition, tuple(cls._norms))

            wanted = used & {*cls.linears, *cls._norms}
            made = edited(method, edit, names) if wanted else None
            if made is not None and (groups or joined):
                cls.changes_in_place |= bool(groups) and any(map(_IN_PLACE.fullmatch, used))
                cls.read_together += tuple(groups)
                cls.joined += tuple(joined)
                setattr(cls, name, made)
            elif used & names.keys():
                setattr(cls, name, redirected(method, names))
        uses = ["apply_rope"] if names else []
        ops = {
            norm.name: "add_layer_norm" if norm.made.centred else "add_rms_norm"
            for norm in cls.norms
        }
        cls.uses = (*uses, *dict.fromkeys(ops[name] for name in cls.joined))

    def read_linears(self, x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
        """The outputs of layers that share their input."""
        return apply_linears(x, layers)

    def add_norm(self, name: str, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of a sum, and the sum."""
        norm: Any = getattr(self, name)
        joined = self._norms[name]
        made = joined.made
        # peft's modules_to_save wraps a norm: its wrapper decides which weight counts.
        is_other = not isinstance(norm, joined.kind) or x.shape != residual.shape
        if is_other or self.decodes(x) or made.keeps_own(x):
            total = residual + x
            return norm(total), total
        y, total = made.run(norm, x, residual)
        return y, total


_ANGLES = {"cos", "sin", "freqs_cis", "freqs", "position_ids", "sinusoidal_pos"}


class Turn(NamedTuple):
    """One variant.

    Attributes:
        angles: "" for each angle twice, in halves; "half": each once; "paired": in neighbours.
        sign: -1 turns back.
        unpairs: the columns are sorted from neighbours into halves first.
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
        has_no_batch = states[0].dim() == 3
        if has_no_batch:  # a tower's: (S, heads, D)
            states = [each[None] for each in states]
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
        if has_no_batch:
            turned = (turned[0][0], turned[1][0])
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
    most = max([flat[i].dim() for i in places], default=0)
    places = [i for i in places if flat[i].dim() == most]
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
    if truth.error:
        return Finding("rope", "refused", truth.error[1])
    repeats = _repeats([each for i, each in enumerate(wide) if i not in places])
    variants = (turn for turn in turns() if turn.angles or turn.interleaved or repeats)
    fit = first_fit(truth, variants, lambda turn: on(kernel_for(function, turn), wide))
    if fit.reason:
        return Finding("rope", "refused", fit.reason)
    low = [_low(each) for each in flat]
    x16 = [each.to(torch.bfloat16) for each in inputs]
    ours = kernel_for(function, fit.variant)
    share = share_of_other_bits(on(function, low), on(ours, low), x16)
    return Finding("rope", "on", str(fit.variant), fit.error, share, None, {"turn": fit.variant})


def _repeats(flat: list[Any]) -> bool:
    """Whether the second half of the angles repeats the first, as the kernel takes for granted."""
    tables = [each for each in flat if isinstance(each, Tensor) and each.is_floating_point()]
    return all(
        relative(*reversed(each.chunk(2, -1))) == 0.0 for each in tables if each.shape[-1] % 2 == 0
    )


def _is_states(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() in (3, 4)


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
