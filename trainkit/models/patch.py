"""Swap kernels into a loaded model, say what was done, and undo it.

A module is patched by giving it a generated subclass as ``__class__``: parameters, buffers, hooks,
state dict and the names of classes stay as they are, and ``revert`` gives back the very model.
Nothing outside the model changes.
"""

import importlib
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from types import ModuleType

import transformers
from torch import nn
from transformers import PreTrainedModel

from trainkit.errors import PatchError
from trainkit.models import guards
from trainkit.models.families import FAMILIES, OPS, Family, Unsupported
from trainkit.models.forwards import KernelForward


@dataclass(frozen=True)
class PatchRow:
    """One op in one model.

    Args:
        op: the switch, one of ``OPS``.
        status: "on" or "off".
        reason: why it is off; empty when it is on.
        kernels: the public functions of ``trainkit.kernels`` that now run.
        num_modules: how many modules run them.
    """

    op: str
    status: str
    reason: str = ""
    kernels: tuple[str, ...] = ()
    num_modules: int = 0


class PatchReport:
    """What ``patch`` did to a model; prints as a table.

    Attributes:
        family: the row of the table that was used.
        rows: one ``PatchRow`` per op, in the order of ``OPS``.
    """

    def __init__(
        self, model: nn.Module, family: Family, rows: list[PatchRow], swapped: set[type[nn.Module]]
    ) -> None:
        self._model = weakref.ref(model)
        self.family = family
        self.rows = rows
        self._swapped = swapped

    @property
    def model(self) -> nn.Module:
        """The patched model, which the report does not keep alive.

        Raises:
            PatchError: the model is gone.
        """
        model = self._model()
        if model is None:
            raise PatchError("the patched model no longer exists")
        return model

    @property
    def active(self) -> bool:
        """Whether the swaps are in place: False after ``revert`` or when every op is off."""
        return bool(self._swapped)

    def row(self, op: str) -> PatchRow:
        """The row of one op."""
        return next(row for row in self.rows if row.op == op)

    def revert(self) -> None:
        """Give every module its class back, copies that peft made of them included.

        The model computes bit for bit what it computed before. A second call does nothing.

        Raises:
            PatchError: something else has swapped a class on top; nothing is changed then.
        """
        for module in _patched_modules(self.model, self._swapped):
            if type(module) not in self._swapped:
                raise PatchError(
                    f"{type(module).__name__} has another class swapped on top of the kernels'",
                    fix="undo the later change first (for fused LoRA: its own revert)",
                )
        self._restore()
        self._swapped = set()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Within, the model runs without the kernels, and without what was swapped on top."""
        before = self._restore()
        try:
            yield
        finally:
            for module, subclass in before.items():
                module.__class__ = subclass

    def _restore(self) -> dict[nn.Module, type[nn.Module]]:
        """Give the modules their first classes back; returns what they had."""
        before = {module: type(module) for module in _patched_modules(self.model, self._swapped)}
        for module, subclass in before.items():
            module.__class__ = next(_originals[c] for c in subclass.__mro__ if c in self._swapped)
        return before

    def to_dict(self) -> dict[str, object]:
        """Plain values for kernels.json."""
        return {
            "family": self.family.name,
            "transformers": transformers.__version__,
            "ops": [asdict(row) for row in self.rows],
        }

    def __str__(self) -> str:
        lines = [f"kernels for {self.family.name} (transformers {transformers.__version__})"]
        width = max(len(row.op) for row in self.rows)
        for row in self.rows:
            if row.status == "on":
                detail = f"{', '.join(row.kernels)} in {row.num_modules} modules"
            else:
                detail = row.reason
            lines.append(f"  {row.op:<{width}}  {row.status:<3}  {detail}")
        return "\n".join(lines)

    __repr__ = __str__


def patch(model: nn.Module, kernels: bool | Mapping[str, bool] = True) -> PatchReport:
    """Swap trainkit's kernels into a loaded causal language model, in place.

    The model may be bare or wrapped by peft; call it before or after ``get_peft_model``, and before
    DeepSpeed, DDP or FSDP wrap it. Either every swap is made or none is.

    Args:
        model: a model of one of the families in ``trainkit.models.families``.
        kernels: True for all, False for none, or ``{"rope": False, ...}``; an op that is not
            mentioned is on.

    Returns:
        The report, with ``revert()``.

    Raises:
        PatchError: the family has no row; an op is unknown, or asked for by name and impossible; a
            class is missing or changed in this transformers; the model is patched already (by
            trainkit, which is refused rather than repeated, or by Liger).
    """
    family = family_of(model)
    wanted = _switches(kernels)
    modeling = importlib.import_module(family.modeling)
    if next(_patched_modules(model, set(_originals)), None) is not None:
        raise PatchError(
            "the model is already patched", fix="call revert() on the first patch's report"
        )
    guards.refuse_liger(modeling)

    rows: list[PatchRow] = []
    plan: dict[nn.Module, type[nn.Module]] = {}
    for op in OPS:
        row, swaps = _plan_op(op, wanted[op], family, modeling, model)
        if row.status == "off" and wanted[op] == "named":
            raise PatchError(f"{op} cannot be switched on for {family.name}: {row.reason}")
        taken = plan.keys() & swaps.keys()
        if taken:
            claimed = type(taken.pop()).__name__
            raise PatchError(f"two ops of the {family.name} row claim {claimed}")
        plan.update(swaps)
        rows.append(row)
    for module, subclass in plan.items():
        module.__class__ = subclass
    return PatchReport(model, family, rows, set(plan.values()))


def family_of(model: nn.Module) -> Family:
    """The row for a model, found by ``config.model_type`` of its outermost Hugging Face model.

    Raises:
        PatchError: there is no such row.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            model_type = module.config.model_type
            for family in FAMILIES.values():
                if family.model_type == model_type:
                    return family
            raise PatchError(
                f"trainkit has no kernels for model_type {model_type!r}; it has them for "
                + ", ".join(FAMILIES),
                fix="train without kernels (`kernels: false`), or add a row: CONTRIBUTING.md",
            )
    raise PatchError(f"{type(model).__name__} holds no Hugging Face model")


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class a module has, or had before it was patched."""
    return _originals.get(type(module), type(module))


def _switches(kernels: bool | Mapping[str, bool]) -> dict[str, str]:
    """Per op: "on", "off", or "named" for an op that was asked for by name."""
    if isinstance(kernels, bool):
        return dict.fromkeys(OPS, "on" if kernels else "off")
    for name in kernels:
        if name not in OPS:
            near = get_close_matches(name, OPS, n=1)
            raise PatchError(
                f"unknown op {name!r}; the ops are {', '.join(OPS)}",
                where="kernels",
                fix=f"did you mean {near[0]!r}?" if near else None,
            )
    words = {True: "named", False: "off"}
    return {op: words[kernels[op]] if op in kernels else "on" for op in OPS}


def _plan_op(
    op: str, switch: str, family: Family, modeling: ModuleType, model: nn.Module
) -> tuple[PatchRow, dict[nn.Module, type[nn.Module]]]:
    """The report's row for one op and the swaps it means; changes nothing."""
    if op not in family.ops:
        raise PatchError(
            f"the {family.name} row says nothing about {op}",
            fix="give it a Swap or an Unsupported in trainkit/models/families.py",
        )
    entry = family.ops[op]
    if switch == "off":
        return PatchRow(op, "off", "switched off"), {}
    if isinstance(entry, Unsupported):
        return PatchRow(op, "off", entry.reason), {}
    swaps: dict[nn.Module, type[nn.Module]] = {}
    for swap in entry:
        if swap.at is None:
            original = guards.find_class(modeling, swap.target, family.name)
        else:
            original = getattr(nn, swap.target)
        subclass = _subclass(original, swap.forward, modeling, swap.settings)
        guards.check_forward(original, subclass)
        modules = _modules_of(model, original, swap.at, family)
        if not modules:
            raise PatchError(
                f"the model has no {swap.target}, which the {family.name} row patches for {op}",
                where=f"transformers {transformers.__version__}",
                fix=f"pass the whole {family.causal_lm}, or switch {op} off",
            )
        guards.check_instances(modules, original)
        for module in modules:
            reason = subclass.unfit(module)
            if type(module) is not original:  # a LoRA or quantised layer stands at `swap.at`
                reason = f"{swap.at} is a {type(module).__name__}, not a plain Linear"
            if reason:
                return PatchRow(op, "off", f"{swap.target}: {reason}"), {}
        swaps.update(dict.fromkeys(modules, subclass))
    names = tuple(dict.fromkeys(name for swap in entry for name in swap.forward.uses))
    return PatchRow(op, "on", "", names, len(swaps)), swaps


def _modules_of(
    model: nn.Module, original: type[nn.Module], at: str | None, family: Family
) -> list[nn.Module]:
    if at is None:
        return [module for module in model.modules() if type(module) is original]
    heads = (module for module in model.modules() if type(module).__name__ == family.causal_lm)
    return [head.get_submodule(at) for head in heads]


_originals: dict[type[nn.Module], type[nn.Module]] = {}
"""Every generated subclass and the class it stands for."""


_subclasses: dict[tuple[object, ...], type[KernelForward]] = {}


def _subclass(
    original: type[nn.Module],
    forward: type[KernelForward],
    modeling: ModuleType,
    settings: Mapping[str, object],
) -> type[KernelForward]:
    """``forward`` in front of ``original``, under the original's name; made once.

    The name stays because others look classes up by it: FSDP's wrapping policy, transformers'
    record of outputs, ``_no_split_modules``. Building it as a subclass lets transformers' layer
    class wrap the new forward for gradient checkpointing.
    """
    key = (original, forward, *sorted(settings.items()))
    if key in _subclasses:
        return _subclasses[key]
    namespace = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "modeling": modeling,
        **settings,
    }
    subclass = type(original.__name__, (forward, original), namespace)
    _originals[subclass] = original
    _subclasses[key] = subclass
    return subclass


def _patched_modules(model: nn.Module, generated: set[type[nn.Module]]) -> Iterator[nn.Module]:
    """Modules whose class is one of ``generated`` or was derived from one."""
    parents = tuple(generated)
    return (module for module in model.modules() if isinstance(module, parents))
