"""Linear layers whose weight is read by the module that holds them, past their own forward.

A packed weight is codes, which only the layer itself can read; an adapter on such a layer would
never act. Found in the source of what ``forward`` can reach, with the settings of the module.
"""

from __future__ import annotations

import ast
import functools
import inspect
from types import FunctionType
from typing import Any

from torch import nn

from trainkit.models.proof.source import definition_of, names_in

_HARMLESS = frozenset({"dtype", "device", "shape", "ndim", "is_cuda", "size", "numel"})
"""What may be asked of a weight: packed, it answers in its own way, and nothing is computed."""

_NOTHING = "return None"

_PACKED = "_is_quantized"
"""What transformers gives the configuration of a model whose layers it has packed."""


def read_weights(model: nn.Module, *, packed: bool = False) -> dict[str, str]:
    """Full name of each linear layer whose weight another module reads: that module's class.

    Some classes have a branch for layers that are packed, as they are or will be.
    """
    found = {}
    is_packed = packed or hasattr(getattr(model, "config", None), _PACKED)
    for name, module in model.named_modules():
        kind: Any = type(module)
        for path, settings in _reads(kind, is_packed):
            full = f"{name}.{path}" if name else path
            try:
                layer = module.get_submodule(path)
            except AttributeError:  # a layer that this configuration has not
                continue
            if isinstance(layer, nn.Linear) and all(getattr(module, s, True) for s in settings):
                found[full] = type(module).__name__
    return found


@functools.cache
def _reads(kind: Any, is_packed: bool) -> frozenset[tuple[str, tuple[str, ...]]]:
    """``out_proj`` for each ``self.out_proj.weight`` that ``forward`` can reach; if so set."""
    found: set[tuple[str, tuple[str, ...]]] = set()
    todo, seen = ["forward"], set()
    while todo:
        name = todo.pop()
        method = inspect.getattr_static(kind, name, None)
        if name in seen or not isinstance(method, FunctionType):
            continue
        seen.add(name)
        plain = inspect.unwrap(method)
        definition = definition_of(plain)
        if definition is not None:
            todo += names_in(plain.__code__)
            reader = _Reader(plain, is_packed)
            reader.visit(definition)
            found |= reader.found
    return frozenset(found)


class _Reader(ast.NodeVisitor):
    """Walks one method and keeps the settings that a branch is taken with."""

    def __init__(self, function: FunctionType, is_packed: bool) -> None:
        self._function, self._is_packed = function, is_packed
        self._settings: tuple[str, ...] = ()
        self.found: set[tuple[str, tuple[str, ...]]] = set()

    def visit_If(self, node: ast.If) -> None:
        """The body under what the test asks of the module; both branches of any other test."""
        outside, test = self._settings, ast.unparse(node.test)
        if test == f"hasattr(self.config, '{_PACKED}')":
            for part in node.body if self._is_packed else node.orelse:
                self.visit(part)
            return
        words = [each.removeprefix("self.") for each in test.split(" and ") if " or " not in test]
        self._settings = (*outside, *filter(str.isidentifier, words))
        for part in node.body:
            self.visit(part)
        self._settings = outside
        for other in (node.test, *node.orelse):
            self.visit(other)

    def visit_Call(self, node: ast.Call) -> None:
        """What a kernel is given that is not installed, nobody reads."""
        if not _is_missing_kernel(node.func, self._function):
            self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Note a weight; ask no further where its kind alone is asked for."""
        first, *path, last = ast.unparse(node).split(".") if _is_chain(node) else ("", "")
        if (first, last) == ("self", "weight") and path and isinstance(node.ctx, ast.Load):
            self.found.add((".".join(path), self._settings))
        elif node.attr not in _HARMLESS:
            self.generic_visit(node)


def _is_chain(node: Any) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def _is_missing_kernel(called: ast.expr, function: FunctionType) -> bool:
    """Whether it stands for a kernel that is not installed: the model goes on without it."""
    found = function.__globals__.get(called.id) if isinstance(called, ast.Name) else None
    if not isinstance(found, FunctionType):
        return False
    plain = inspect.unwrap(found)
    cells = [cell.cell_contents for cell in found.__closure__ or ()]
    names = dict(zip(found.__code__.co_freevars, cells, strict=True))
    body = getattr(definition_of(plain), "body", [])
    return names.get("implementation", plain) is plain and [*map(ast.unparse, body)] == [_NOTHING]
