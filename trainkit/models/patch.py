"""Swap kernels into a loaded model, say what was done, and undo it.

The family's row says which forward goes over which class; ``trainkit.models.swap`` does it. Nothing
outside the model changes.
"""

import importlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from types import ModuleType

import transformers
from torch import nn
from transformers import PreTrainedModel

from trainkit.errors import PatchError
from trainkit.models.checks import guards
from trainkit.models.families import FAMILIES, Family, Unsupported
from trainkit.models.forwards.layers import KernelForward
from trainkit.models.loss.loss_head import head_at_work
from trainkit.models.swap import Swaps, plain_class, subclass_of
from trainkit.options.model import OPS


@dataclass(frozen=True)
class PatchRow:
    """One op in one model.

    Args:
        op: the switch: one of ``OPS``, or of the fused adapters' ops.
        status: "on" or "off".
        reason: why it is off, or what keeps some of the modules on their own path.
        kernels: the public functions of ``trainkit.kernels`` that now run.
        num_modules: how many modules run them.
    """

    op: str
    status: str
    reason: str = ""
    kernels: tuple[str, ...] = ()
    num_modules: int = 0


class PatchReport:
    """What was swapped into a model; prints as a table.

    Attributes:
        rows: one ``PatchRow`` per op: those of ``OPS``, then those of fused adapters.
    """

    def __init__(self, family: Family | None, rows: list[PatchRow], swaps: Swaps) -> None:
        self.rows = rows
        self._family = family
        self._swaps = swaps

    @property
    def family(self) -> Family:
        """The row of the table that was used.

        Raises:
            PatchError: the report is of fused adapters alone.
        """
        if self._family is None:
            raise PatchError("a report of fused adapters alone has no family")
        return self._family

    @property
    def model(self) -> nn.Module:
        """The patched model, which the report does not keep alive.

        Raises:
            PatchError: the model is gone.
        """
        return self._swaps.model

    @property
    def active(self) -> bool:
        """Whether the swaps are in place: False after ``revert`` or when every op is off."""
        return self._swaps.active

    @property
    def switches(self) -> dict[str, bool]:
        """Which of ``OPS`` are on, as ``patch_kernels`` takes them."""
        return {row.op: row.status == "on" for row in self.rows if row.op in OPS}

    def row(self, op: str) -> PatchRow:
        return next(row for row in self.rows if row.op == op)

    def revert(self) -> None:
        """Give every module its class back; see ``Swaps.revert``."""
        self._swaps.revert()

    def suspended(self) -> AbstractContextManager[None]:
        """Within, the model runs without the swaps, and without what lies on top of them."""
        return self._swaps.suspended()

    def joined(self, later: "PatchReport") -> "PatchReport":
        """One report of this and of what a later one has swapped on top."""
        swaps = self._swaps.joined(later._swaps)
        return PatchReport(self._family or later._family, [*self.rows, *later.rows], swaps)

    def to_dict(self) -> dict[str, object]:
        """Plain values for kernels.json."""
        return {
            "family": self._family.name if self._family else None,
            "transformers": transformers.__version__,
            "ops": [asdict(row) for row in self.rows],
        }

    def __str__(self) -> str:
        name = f" for {self._family.name}" if self._family else ""
        lines = [f"kernels{name} (transformers {transformers.__version__})"]
        width = max(len(row.op) for row in self.rows)
        for row in self.rows:
            what = f"{', '.join(row.kernels)} in {row.num_modules} modules" if row.kernels else ""
            detail = "; ".join(part for part in (what, row.reason) if part)
            lines.append(f"  {row.op:<{width}}  {row.status:<3}  {detail}")
        return "\n".join(lines)

    __repr__ = __str__


def patch_kernels(model: nn.Module, kernels: bool | Mapping[str, bool] = True) -> PatchReport:
    """Swap the kernels of the family's row into a loaded causal language model, in place.

    ``trainkit.patch`` does this and fuses adapters, too.

    Args:
        model: a model of one of the families in ``trainkit.models.families``, bare or wrapped by
            peft; before DeepSpeed, DDP or FSDP wrap it.
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
    if any(isinstance(module, KernelForward) for module in model.modules()):
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
    return PatchReport(family, rows, Swaps(model, plan))


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
                fix="train without kernels (`kernels: false`), or add a row to "
                "trainkit/models/families.py",
            )
    raise PatchError(f"{type(model).__name__} holds no Hugging Face model")


def refuse_unknown(names: Iterable[str], known: Sequence[str]) -> None:
    """Refuse the name of an op that is not known, with the nearest one.

    Raises:
        PatchError: there is one.
    """
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            raise PatchError(
                f"unknown op {name!r}; the ops are {', '.join(known)}",
                where="kernels",
                fix=f"did you mean {near[0]!r}?" if near else None,
            )


def _switches(kernels: bool | Mapping[str, bool]) -> dict[str, str]:
    """Per op: "on", "off", or "named" for an op that was asked for by name."""
    if isinstance(kernels, bool):
        return dict.fromkeys(OPS, "on" if kernels else "off")
    refuse_unknown(kernels, OPS)
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
        settings = {"modeling_name": family.modeling, **swap.settings}
        subclass = subclass_of(original, swap.forward, settings)
        guards.check_forward(original, subclass)
        modules = _modules_of(model, original, swap.at, family)
        if not modules:
            raise PatchError(
                f"the model has no {swap.target}, which the {family.name} row patches for {op}",
                where=f"transformers {transformers.__version__}",
                fix=f"pass the complete {family.causal_lm}, or switch {op} off",
            )
        guards.check_instances(modules, original)
        for module in modules:
            reason = subclass.unfit(module)
            if plain_class(module) is not original:  # a LoRA or quantised layer is at `swap.at`
                reason = f"{swap.at} is a {type(module).__name__}, not a plain Linear"
            if reason:
                return PatchRow(op, "off", f"{swap.target}: {reason}"), {}
        # What trains in fp8 is that already; a plain module gets the same class as without.
        swaps.update({each: subclass_of(type(each), swap.forward, settings) for each in modules})
    names = tuple(dict.fromkeys(name for swap in entry for name in swap.forward.uses))
    return PatchRow(op, "on", "", names, len(swaps)), swaps


def _modules_of(
    model: nn.Module, original: type[nn.Module], at: str | None, family: Family
) -> list[nn.Module]:
    if at is None:
        return [module for module in model.modules() if type(module) is original]
    heads = (module for module in model.modules() if type(module).__name__ == family.causal_lm)
    return [head_at_work(head.get_submodule(at)) for head in heads]
