"""Modules that run Hugging Face's own forward with a few calls replaced.

Attention: the turning function is the kernel, and linear layers that read one input are read
together. A decoder layer: an addition and the norm after it are one pass. All else stays as it is
written: caches, masks, windows, dropout, multipliers, what a release adds.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from trainkit import kernels
from trainkit.models.proof.forward import KernelForward
from trainkit.models.proof.norms import Cast
from trainkit.models.proof.rotary import Turn, kernel_for, turning_functions
from trainkit.models.proof.source import (
    edited,
    join_linears,
    join_norms,
    methods,
    names_in,
    redirected,
)
from trainkit.models.shared_input import apply_linears

_IN_PLACE = re.compile(r"[a-z][a-z0-9_]*[a-z0-9]_")


class JoinedNorm(NamedTuple):
    """A norm that takes an addition in.

    Attributes:
        name: of the child.
        kind: its class.
        weight_name: its weight's name.
        epsilon: the attribute that holds it, or the number.
        offset: added to the weight.
        cast: where it rounds.
    """

    name: str
    kind: type[nn.Module]
    weight_name: str
    epsilon: str | float
    offset: float
    cast: Cast


class Rewritten(KernelForward):
    """Hugging Face's methods with what the class attributes say replaced.

    Attributes:
        turning: names of turning functions, and which variant each is.
        linears: linear layers that may be read together where the source reads one variable.
        norms: those that may take in the addition before them.
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
        cls.uses = (*uses, *(["add_rms_norm"] if cls.joined else []))

    def read_linears(self, x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
        """The outputs of layers that share their input."""
        return apply_linears(x, layers)

    def add_norm(self, name: str, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of a sum, and the sum."""
        norm: Any = getattr(self, name)
        made = self._norms[name]
        # peft's modules_to_save wraps a norm: its wrapper decides which weight counts.
        if not isinstance(norm, made.kind) or x.shape != residual.shape or self.decodes(x):
            total = residual + x
            return norm(total), total
        epsilon = made.epsilon
        return kernels.add_rms_norm(
            x,
            residual,
            getattr(norm, made.weight_name) if made.weight_name else x.new_ones(x.shape[-1]),
            getattr(norm, epsilon) if isinstance(epsilon, str) else epsilon,
            offset=made.offset,
            cast=made.cast,
            fp8_rows=getattr(norm, "feeds_fp8", False),
        )
