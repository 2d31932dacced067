"""Hugging Face's own methods with other globals, or with a few statements joined.

A copy of a method keeps everything that is not replaced: caches, masks, windows, dropout, what a
release adds. Its globals are those of a module of its own, so that nothing outside the copy changes
and torch.compile finds them by name.
"""

import ast
import inspect
import itertools
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

_COPIES = itertools.count()
_NOT_THE_MODELS = ("torch.", "trainkit.", "transformers.modeling_", "transformers.utils")


def methods(kind: type[nn.Module]) -> Iterator[tuple[str, FunctionType]]:
    """The methods that a model's own code gives a class, each as it is called."""
    seen: set[str] = set()
    for each in kind.__mro__:
        if f"{each.__module__}.".startswith(_NOT_THE_MODELS) or each is object:
            continue
        for name, function in vars(each).items():
            if isinstance(function, FunctionType) and name not in seen:
                seen.add(name)
                yield name, function


def names_in(code: CodeType) -> set[str]:
    """Every global and attribute name in a function's byte code, inner functions included."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*map(names_in, inner))


def redirected(function: FunctionType, names: Mapping[str, Any]) -> FunctionType:
    """A method's own byte code with some of its globals replaced."""
    return _rebuilt(function, lambda inner: _copy(inner, inner.__code__, names))


def edited(
    function: FunctionType, edit: Callable[[ast.FunctionDef], None], names: Mapping[str, Any]
) -> FunctionType | None:
    """A method with its source changed by ``edit``, and some globals replaced.

    Returns:
        None where the source cannot be compiled by itself: it is not there, or closes over names.
    """
    inner = inspect.unwrap(function)
    definition = definition_of(inner)
    if definition is None or inner.__closure__:
        return None
    definition.decorator_list = []
    edit(definition)
    tree = ast.Module([definition], [])
    ast.fix_missing_locations(tree)
    ast.increment_lineno(tree, inner.__code__.co_firstlineno - 1)
    kept = inner.__code__.co_flags & 0x1000000  # from __future__ import annotations
    code = compile(tree, inner.__code__.co_filename, "exec", flags=kept, dont_inherit=True)
    bodies = [each for each in code.co_consts if isinstance(each, CodeType)]
    body = next(each for each in bodies if each.co_name == definition.name)
    return _rebuilt(function, lambda plain: _copy(plain, body, names))


def definition_of(function: FunctionType) -> ast.FunctionDef | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, SyntaxError, TypeError):
        return None
    found = tree.body[0]
    return found if isinstance(found, ast.FunctionDef) else None


def _copy(function: FunctionType, code: CodeType, names: Mapping[str, Any]) -> FunctionType:
    module = ModuleType(f"{function.__module__}.__copy_{next(_COPIES)}")
    vars(module).update({**function.__globals__, **names, "__name__": module.__name__})
    sys.modules[module.__name__] = module
    made = FunctionType(
        code, vars(module), function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__, made.__module__ = function.__kwdefaults__, function.__module__
    made.__qualname__, made.__doc__ = function.__qualname__, function.__doc__
    made.__annotations__ = function.__annotations__
    made.__dict__.update(function.__dict__)
    return made


def _rebuilt(function: FunctionType, make: Callable[[FunctionType], FunctionType]) -> FunctionType:
    """The function with its innermost one replaced; decorators stay around it."""
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        return make(function)
    new = _rebuilt(inner, make)
    cells = tuple(
        CellType(new) if _held(cell) is inner else cell for cell in function.__closure__ or ()
    )
    made = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
    )
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(function.__dict__)
    made.__wrapped__ = new  # type: ignore[attr-defined]
    made.__module__, made.__qualname__ = function.__module__, function.__qualname__
    return made


def _held(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet filled
        return None


# Edits.


def _called(node: ast.AST, names: Collection[str]) -> tuple[str, ast.expr] | None:
    """``self.NAME(X)`` as (NAME, X), for one of the names."""
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "self"
        and node.func.attr in names
        and len(node.args) == 1
        and not node.keywords
    ):
        return node.func.attr, node.args[0]
    return None


def _own_call(node: ast.AST, names: Collection[str]) -> tuple[str, str] | None:
    """Likewise of a plain variable, which is named."""
    found = _called(node, names)
    return (found[0], found[1].id) if found and isinstance(found[1], ast.Name) else None


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Every straight run of statements in a function, inner functions left out."""
    for field in ("body", "orelse", "finalbody"):
        block = getattr(node, field, None)
        if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
            yield block
            for each in block:
                if not isinstance(each, (ast.FunctionDef, ast.ClassDef)):
                    yield from _blocks(each)


def _at_once(statement: ast.stmt) -> Iterator[ast.AST]:
    """What a simple statement evaluates exactly once."""
    if not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return)):
        return
    todo: list[ast.AST] = [statement]
    while todo:
        node = todo.pop()
        yield node
        lazy = (ast.IfExp, ast.BoolOp, ast.Lambda, ast.ListComp, ast.GeneratorExp, ast.DictComp)
        if not isinstance(node, lazy):
            todo += ast.iter_child_nodes(node)


class _Replace(ast.NodeTransformer):
    def __init__(self, new: Mapping[int, ast.expr]) -> None:
        self._new = new

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if id(node) in self._new:
            return self._new[id(node)]
        return super().generic_visit(node)


def _statement(text: str, like: ast.AST) -> ast.stmt:
    made = ast.parse(text).body[0]
    for each in ast.walk(made):
        ast.copy_location(each, like)
    return made


def join_norms(definition: ast.FunctionDef, norms: Collection[str]) -> tuple[str, ...]:
    """``h = r + x; ...; self.norm(h)`` becomes ``normed, h = self.add_norm("norm", x, r)``.

    Between the two stand nothing but copies of variables. Either order, x any expression. And
    ``self.norm(x + r)`` becomes the first of ``self.add_norm("norm", x, r)``.

    Returns:
        The norms that now take the addition in.
    """
    joined: list[str] = []
    for block in _blocks(definition):
        for number, statement in enumerate(block):
            for node in _at_once(statement):
                match _called(node, norms):
                    case norm, ast.BinOp(left, ast.Add(), right):
                        made = f"self.add_norm({norm!r}, {ast.unparse(left)}, "
                        new: Any = _statement(f"{made}{ast.unparse(right)})[0]", node)
                        _Replace({id(node): new.value}).visit(statement)
                        joined.append(norm)
            parts = _addition(statement)
            if parts is None:
                continue
            h, x, residual = parts
            user = next((each for each in block[number + 1 :] if not _is_copy(each, h)), None)
            if user is None:
                continue
            calls = [
                (node, own[0])
                for node in _at_once(user)
                if (own := _own_call(node, norms)) and own[1] == h
            ]
            if len(calls) != 1:
                continue
            call, norm = calls[0]
            normed = f"__normed_{len(joined)}"
            _Replace({id(call): ast.Name(normed, ast.Load())}).visit(user)
            text = (
                f"{normed}, {h} = self.add_norm({norm!r}, "
                f"({ast.unparse(x)}), ({ast.unparse(residual)}))"
            )
            block[number] = _statement(text, statement)
            joined.append(norm)
    return tuple(joined)


def _addition(statement: ast.stmt) -> tuple[str, ast.expr, ast.expr] | None:
    """``h = r + x`` as (h, x, r), where one side at least is a plain variable."""
    if not (
        isinstance(statement, ast.Assign)
        and len(statement.targets) == 1
        and isinstance(statement.targets[0], ast.Name)
        and isinstance(statement.value, ast.BinOp)
        and isinstance(statement.value.op, ast.Add)
    ):
        return None
    left, right = statement.value.left, statement.value.right
    h = statement.targets[0].id
    if isinstance(left, ast.Name):
        return h, right, left
    return (h, left, right) if isinstance(right, ast.Name) else None


def _is_copy(statement: ast.stmt, h: str) -> bool:
    """``other = h``: of the sum, to a variable that is not the sum's own."""
    return (
        isinstance(statement, ast.Assign)
        and isinstance(statement.value, ast.Name)
        and len(statement.targets) == 1
        and isinstance(statement.targets[0], ast.Name)
        and statement.targets[0].id != h
    )


def join_linears(
    definition: ast.FunctionDef, linears: Collection[str]
) -> tuple[tuple[str, ...], ...]:
    """``self.a(x) ... self.b(x)`` becomes ``a, b = self.read_linears(x, self.a, self.b)``.

    They are in one block, each is called once in the whole function, and x is given no other value
    in between.

    Returns:
        The groups that are now read together.
    """
    everywhere = [own[0] for node in ast.walk(definition) if (own := _own_call(node, linears))]
    mentioned = [
        node.attr
        for node in ast.walk(definition)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    ]
    groups: list[tuple[str, ...]] = []
    for block in list(_blocks(definition)):
        by_input: dict[str, list[tuple[int, ast.AST, str]]] = {}
        for number, statement in enumerate(block):
            for node in _at_once(statement):
                own = _own_call(node, linears)
                if own and everywhere.count(own[0]) == 1 == mentioned.count(own[0]):
                    by_input.setdefault(own[1], []).append((number, node, own[0]))
        inserted: list[tuple[int, ast.stmt]] = []
        for x, calls in by_input.items():
            calls.sort(key=lambda each: each[0])
            first, last = calls[0][0], calls[-1][0]
            if len(calls) < 2 or _is_given(x, block[first:last]):
                continue
            names = [f"__linear_{len(groups)}_{number}" for number in range(len(calls))]
            new = {
                id(node): ast.Name(name, ast.Load())
                for (_, node, _), name in zip(calls, names, strict=True)
            }
            for statement in block[first : last + 1]:
                _Replace(new).visit(statement)
            layers = tuple(each for *_, each in calls)
            text = (
                f"{', '.join(names)} = self.read_linears({x}, "
                f"{', '.join(f'self.{each}' for each in layers)})"
            )
            inserted.append((first, _statement(text, block[first])))
            groups.append(layers)
        for number, statement in sorted(inserted, key=lambda each: each[0], reverse=True):
            block.insert(number, statement)
    return tuple(groups)


def _is_given(name: str, statements: list[ast.stmt]) -> bool:
    return any(
        isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load)
        for statement in statements
        for node in ast.walk(statement)
    )
