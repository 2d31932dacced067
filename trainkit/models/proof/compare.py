"""Hold two functions against each other: outputs and every gradient, in fp64 and in bits.

Hugging Face casts to fp32 inside its modules, which would hide what is below 1e-7. `Wide` sends
every such cast to fp64, so that what is equal agrees to 1e-15 and what is nearly equal does not.

Numbers alone do not prove: a clamp that no input reaches, or an ``if`` on a length, is seen by no
comparison. `Wide` therefore keeps the names of the torch functions that ran, and `decisions` reads
what the source decides by.
"""

import ast
import dis
import inspect
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from trainkit.auto_class import FAILURES
from trainkit.models.swap import KernelForward

EXACT = 1e-10
"""In fp64, of a module: what is equal agrees to some 1e-15, the nearest near miss is at 1e-6."""

BRANCHES = frozenset(
    (
        "__bool__", "item", "tolist", "clamp", "clamp_", "clip", "clip_", "clamp_min",
        "clamp_min_", "clamp_max", "clamp_max_", "where", "minimum", "maximum", "fmin", "fmax",
        "max", "min", "nan_to_num", "nan_to_num_", "masked_fill", "masked_fill_", "bernoulli",
        "bernoulli_", "dropout", "dropout_", "alpha_dropout", "hardtanh", "hardtanh_",
        "hardswish", "hardsigmoid", "relu6", "threshold", "threshold_", "round", "floor",
        "ceil", "trunc", "sign", "sgn", "topk", "sort", "argmax", "argmin", "bucketize",
        "allclose", "equal", "isnan", "isinf", "isfinite", "any", "all", "rand", "rand_like",
        "randn_like", "heaviside", "abs", "quantile", "softshrink", "hardshrink", "__lt__",
        "__le__", "__gt__", "__ge__", "__eq__", "__ne__", "lt", "le", "gt", "ge", "eq", "ne",
        "logical_and", "logical_or", "logical_not", "masked_scatter", "index_put_",
        "count_nonzero", "nonzero",
    )
)  # fmt: skip
"""What smooth arithmetic never does: no inputs can be trusted to reach both of its sides."""

_DECIDING = frozenset(
    ("min", "max", "len", "int", "bool", "any", "all", "sorted", "eval", "getattr")
)
"""Functions of Python by which code may turn a size into a decision."""

_DECORATES = ("torch.", "transformers.utils", "transformers.integrations", "transformers.modeling_")
"""Modules whose decorators change what is recorded, not what a norm or a gate computes."""

_NARROW = (torch.float32, torch.bfloat16, torch.float16)
Error = tuple[float, str]
"""The largest relative error, and why it could not be measured."""


@dataclass(frozen=True)
class Finding:
    """What one module was found to be.

    Args:
        op: the switch.
        verdict: "on"; "no kernel": it is known what it is, and trainkit has no kernel for it;
            "refused": it looks like what the op is for, and could not be proved to be.
        detail: what it is, or why it is refused.
        error: the largest relative error of outputs and gradients in fp64.
        bits: the share of bf16 results whose bits are not Hugging Face's; None where none were
            compared.
        forward: the mixin that takes its place, where it is on.
        settings: class attributes of the mixin.
    """

    op: str
    verdict: Literal["on", "no kernel", "refused"]
    detail: str
    error: float | None = None
    bits: float | None = None
    forward: type[KernelForward] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def uses(self) -> tuple[str, ...]:
        """The public functions of ``trainkit.kernels`` that then run."""
        own: tuple[str, ...] = () if self.forward is None else self.forward.uses
        return self.settings.get("uses", own)


class Wide(TorchFunctionMode):
    """Within, every cast to a narrower float goes to fp64.

    Attributes:
        bounds: of every ``clamp``, lower and upper.
    """

    def __init__(self) -> None:
        super().__init__()
        self.used: set[str] = set()
        self.bounds: list[tuple[Any, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name == "where" and len(args) + len(kwargs) == 1:
            name = "nonzero"  # places, not a choice between values
        # p = 0 and evaluation drop nothing; with neither given, torch's p is a half.
        rate = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        drops = args[2] if len(args) > 2 else kwargs.get("training", True)
        if func is not functional.dropout or (rate and drops):
            self.used.add(name)
        if name == "clamp":
            given = dict(zip(("min", "max"), args[1:], strict=False)) | kwargs
            self.bounds.append((given.get("min"), given.get("max")))
        if name in ("float", "half", "bfloat16") and args and isinstance(args[0], Tensor):
            return args[0].double()
        args = tuple(map(_widened, args))
        return func(*args, **{key: _widened(value) for key, value in kwargs.items()})


def _widened(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value


class Truth:
    """The plain function's outputs and gradients on some inputs, computed once.

    Attributes:
        error: set where it cannot be proved to be anything by numbers.
        used: names of the torch functions that it ran.
    """

    def __init__(
        self,
        plain: Callable[..., Any],
        inputs: Sequence[Tensor],
        parameters: Iterable[Tensor],
        allowed: Collection[str] = (),
    ) -> None:
        self._inputs, self._parameters = inputs, list(parameters)
        self.error: Error | None = None
        self.used: set[str] = set()
        with Wide() as mode:
            found = _attempt(lambda: _run(plain, inputs, self._parameters))
        self.used = mode.used
        if isinstance(found, str):
            self.error = (float("inf"), found)
        elif refused := (mode.used & BRANCHES).difference(allowed):
            names = ", ".join(sorted(refused))
            self.error = (float("inf"), f"uses {names}, whose both sides no inputs show")
        self._found = found

    def against(self, ours: Callable[..., Any]) -> Error:
        """The largest relative error of another function's outputs and gradients."""
        with Wide():
            found = _attempt(lambda: _run(ours, self._inputs, self._parameters))
        if isinstance(found, str):
            return float("inf"), found
        assert not isinstance(self._found, str)
        (outputs, gradients), (wanted, wanted_gradients) = found, self._found
        if len(outputs) != len(wanted):
            return float("inf"), "another number of outputs"
        pairs = [*zip(outputs, wanted, strict=True)]
        for ours_gradient, gradient in zip(gradients, wanted_gradients, strict=True):
            if gradient is None and ours_gradient is None:
                continue
            given = gradient if gradient is not None else ours_gradient
            zeros = torch.zeros_like(given)
            pairs.append(
                (
                    zeros if ours_gradient is None else ours_gradient,
                    zeros if gradient is None else gradient,
                )
            )
        return max((relative(*pair) for pair in pairs), default=float("inf")), ""


class Fit(NamedTuple):
    """The variant that computes the same, and what runs it; or why there is none."""

    variant: Any
    ours: Any
    error: float
    reason: str = ""


def first_fit(
    truth: Truth, variants: Iterable[Any], run: Callable[[Any], Callable[..., Any]]
) -> Fit:
    """The first variant that ``run`` makes a function of which gives the truth."""
    nearest: Error = (float("inf"), "")
    for variant in variants:
        ours = run(variant)
        error = truth.against(ours)
        if error[0] < EXACT:
            return Fit(variant, ours, error[0])
        nearest = min(nearest, error, key=lambda each: each[0])
    reason = f"no variant fits, the nearest is off by {nearest[0]:.0e} {nearest[1]}".strip()
    return Fit(None, None, nearest[0], reason)


def _attempt(run: Callable[[], Any]) -> Any:
    """A guess may be of any wrong shape, and a module may refuse any input: then the reason."""
    try:
        return run()
    except FAILURES as no:
        return f"{type(no).__name__}: {(str(no).splitlines() or [''])[0][:90]}"


def _run(
    function: Callable[..., Any], inputs: Sequence[Tensor], parameters: Sequence[Tensor]
) -> tuple[list[Tensor], Sequence[Any]]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = tensors_of(function(*leaves))
    wanted = [*leaves, *(each for each in parameters if each.requires_grad)]
    return [each.detach() for each in outputs], gradients_of(outputs, wanted)


def gradients_of(outputs: Iterable[Tensor], wanted: Sequence[Tensor]) -> Sequence[Any]:
    """Gradients of a weighted sum of outputs, the same weights each time; None where none comes."""
    generator = torch.Generator().manual_seed(7)
    parts = []
    for each in outputs:
        weights = torch.randn(each.shape, generator=generator, dtype=torch.float64).to(each)
        if each.requires_grad:
            parts.append((each * weights).sum())
    total: Any = sum(parts)
    return torch.autograd.grad(total, wanted, allow_unused=True) if parts else [None] * len(wanted)


def tensors_of(found: Any) -> list[Tensor]:
    """Floating-point tensors in whatever a module returns."""
    leaves = tree_leaves(found)
    return [each for each in leaves if isinstance(each, Tensor) and each.is_floating_point()]


def relative(found: Tensor, wanted: Tensor) -> float:
    """The largest difference over the largest value; infinite for another kind of tensor."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype or not wanted.isfinite().all():
        return float("inf")
    if not wanted.numel():
        return 0.0
    difference = (found - wanted).abs().max().item()
    if difference != difference:
        return float("inf")
    return difference / max(wanted.abs().max().item(), 1e-30) if difference else 0.0


def furthest(truth: Mapping[str, Tensor | None], found: Mapping[str, Tensor | None]) -> Error:
    """The largest relative error of values and gradients by name ("d ..."), and where it is."""
    gradients = {name: each for name, each in truth.items() if name.startswith("d ")}
    sizes = {n: 0.0 if g is None else g.abs().max().item() for n, g in gradients.items()}
    largest = max(sizes.values(), default=1.0)
    worst: Error = (0.0, next(iter(truth), ""))
    for name, wanted in truth.items():
        given = found.get(name)
        if wanted is None and given is None:
            continue
        if name not in gradients:
            error = relative(given, wanted) if given is not None and wanted is not None else 1.0
        else:
            some: Any = given if wanted is None else wanted
            other, true = (torch.zeros_like(some) if e is None else e for e in (given, wanted))
            # Some gradients are zero in exact arithmetic: those of a bias of keys under a softmax.
            size = max(sizes[name], 1e-4 * largest, 1e-300)
            error = (other - true).abs_().max().item() / size
        if not error <= worst[0]:
            worst = (error, name)
    return worst


def share_of_other_bits(
    plain: Callable[..., Any], ours: Callable[..., Any], inputs: Sequence[Tensor]
) -> float:
    """The share of outputs whose bits differ; 1 where ours gives something else."""
    with torch.no_grad():
        found = _attempt(lambda: tensors_of(ours(*inputs)))
        wanted = tensors_of(plain(*inputs))
    if isinstance(found, str) or [x.shape for x in found] != [x.shape for x in wanted]:
        return 1.0
    return max(
        (x != y).double().mean().item() if x.dtype == y.dtype else 1.0
        for x, y in zip(found, wanted, strict=True)
    )


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal numbers in fp64 on the CPU, the same on every machine."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * scale


@contextmanager
def other_mode(module: nn.Module) -> Iterator[str]:
    """Within, the module is in the other of training and evaluation mode, which is named."""
    modes = {each: each.training for each in module.modules()}
    module.train(not module.training)
    try:
        yield "training" if module.training else "evaluation"
    finally:
        for each, mode in modes.items():
            each.training = mode


def why_not(
    module: nn.Module,
    ours: Callable[..., Any],
    inputs: Sequence[Tensor],
    allowed: Collection[str] = (),
    decides: Sequence[str] | None = None,
    plain: Callable[..., Any] | None = None,
) -> str | None:
    """Why a module that gave the same numbers as ours may still be another function."""
    if found := decisions(module) if decides is None else decides:
        return f"it decides by {found[0]}"
    with other_mode(module) as mode, torch.no_grad():
        truth = Truth(plain or module, inputs, (), allowed)
        error, _ = truth.error or truth.against(ours)
    return None if error < EXACT else f"another function in {mode}: {error:.0e}"


def decisions(subject: nn.Module | FunctionType) -> list[str]:
    """What a module's or function's own code decides by, other than a module's plain settings.

    One run takes one side. Settings are the same in every run; whether the module trains is not.
    Methods, functions and modules that the forward calls count with it; torch's own do not.
    """
    todo: list[tuple[Any, Any]] = [(None, subject)]
    if isinstance(subject, nn.Module):
        todo = [(each, type(each).forward) for each in subject.modules() if not _is_torchs(each)]
    seen: set[Any] = set()
    found: list[str] = []
    while todo:
        owner, function = todo.pop()
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:
            todo.append((owner, wrapped))
        if not isinstance(function, FunctionType) or function in seen or _is_torchs(function):
            continue
        if wrapped is not None and function.__globals__["__name__"].startswith(_DECORATES):
            continue
        seen.add(function)
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function.__code__)))
        except (OSError, SyntaxError, TypeError):  # no source of its own
            found += _jumps_of(function)
            called = (function.__globals__.get(name) for name in function.__code__.co_names)
            todo += [(owner, each) for each in called if isinstance(each, FunctionType)]
            continue
        found += _decisions_in(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id == "maybe_autocast":  # transformers' own
                found.append("torch.is_autocast_enabled()")
            else:
                todo += [(owner, each) for each in _called_by(node, owner, function)]
    return found


def _called_by(node: ast.AST, owner: Any, function: FunctionType) -> Iterator[Any]:
    """What a name in a function may call: methods, its module's functions, a class's above."""
    if isinstance(node, ast.Name):
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        cell = cells.get(node.id)
        called = cell.cell_contents if cell else function.__globals__.get(node.id)
        if not getattr(called, "__module__", "torch").startswith("torch"):
            yield called
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        if node.value.id == "self":
            yield getattr(type(owner), node.attr, None)
            yield getattr(owner, "__dict__", {}).get(node.attr)
    elif isinstance(node, ast.Attribute) and ast.unparse(node.value).startswith("super("):
        kinds = (each for each in type(owner).__mro__ if not _is_torchs(each))
        yield from (vars(each).get(node.attr) for each in kinds)


def _jumps_of(function: FunctionType) -> list[str]:
    found = [name for name in function.__code__.co_names if name in _DECIDING]
    for each in dis.get_instructions(function):
        jumps = "JUMP" in each.opname and "IF" in each.opname
        if jumps or each.opname in ("FOR_ITER", "COMPARE_OP") or each.argrepr in ("//", "%"):
            found.append(each.opname)
    return found


def _is_torchs(subject: nn.Module | type | FunctionType) -> bool:
    kind = type(subject) if isinstance(subject, nn.Module) else subject
    return kind.__module__.startswith("torch.")


def _decisions_in(tree: ast.AST) -> list[str]:
    tests: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.IfExp, ast.While, ast.Assert)):
            tests.append(node.test)
        elif isinstance(node, (ast.For, ast.comprehension)):
            tests.append(node.iter)
    slices = [node for node in ast.walk(tree) if isinstance(node, ast.Slice)]  # halves of columns
    inside = {id(inner) for each in (*tests, *slices) for inner in ast.walk(each)}
    other = [node for node in ast.walk(tree) if _decides(node) and id(node) not in inside]
    return [ast.unparse(each)[:60] for each in (*tests, *other) if not _is_setting(each)]


def _decides(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, (ast.FloorDiv, ast.Mod))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in _DECIDING
    return isinstance(node, (ast.Try, ast.Match, ast.BoolOp, ast.Compare))


def _is_setting(test: ast.AST) -> bool:
    """Whether a test reads ``self.NAME`` and nothing else."""
    if isinstance(test, (ast.Try, ast.Match)):
        return False
    names = [each for each in ast.walk(test) if isinstance(each, ast.Name)]
    own = [
        each
        for each in ast.walk(test)
        if isinstance(each, ast.Attribute)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
        and each.attr != "training"
    ]
    calls = any(isinstance(each, ast.Call) for each in ast.walk(test))
    return bool(own) and len(names) == len(own) and not calls
