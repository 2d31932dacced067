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

from trainkit.models.proof.forward import KernelForward
from trainkit.models.proof.norms import NormSettings
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
        made: what it computes.
    """

    name: str
    kind: type[nn.Module]
    made: NormSettings


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
