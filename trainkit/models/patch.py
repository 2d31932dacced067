"""Swap kernels into a loaded model, say what was done, and undo it.

The plan says what each module is and what goes over it (`trainkit.models.proof`);
``trainkit.models.swap`` does it. Nothing outside the model changes.

What must hold before a class is swapped: one kernel library at a time.
"""

import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from difflib import get_close_matches

import transformers
from torch import nn
from torch.nn import functional

from trainkit.errors import PatchError
from trainkit.models.loss import why_no_loss_head
from trainkit.models.proof.instances import OwnProof, prove_instances
from trainkit.models.proof.plan import Plan, plan_for
from trainkit.models.proof.replica import outermost
from trainkit.models.swap import KernelForward, Swaps
from trainkit.options.model import OPS

_WIDTH = 80
"""Of the report."""


@dataclass(frozen=True)
class PatchRow:
    """One op in one model.

    Args:
        op: the switch: one of ``OPS``, or of the fused adapters' ops.
        status: "on" or "off".
        reason: why it is off, or what keeps some of the modules on their own path.
        kernels: the public functions of ``trainkit.kernels`` that now run.
        num_modules: how many modules run them.
        found: what the modules were found to be, by their classes.
        error: the largest relative error of the proof, in fp64.
        other_bits: the largest share of a module's bf16 results whose bits are not the plain ones.
    """

    op: str
    status: str
    reason: str = ""
    kernels: tuple[str, ...] = ()
    num_modules: int = 0
    found: tuple[str, ...] = ()
    error: float | None = None
    other_bits: float | None = None


class PatchReport:
    """What was swapped into a model; prints as a table.

    Attributes:
        rows: one ``PatchRow`` per op: those of ``OPS``, then those of fused adapters.
    """

    def __init__(
        self, plan: Plan | None, rows: list[PatchRow], swaps: Swaps, own: OwnProof | None = None
    ) -> None:
        self.rows = rows
        self.own = own or OwnProof()
        self._plan = plan
        self._swaps = swaps

    @property
    def plan(self) -> Plan:
        if self._plan is None:
            raise PatchError("a report of fused adapters alone has no plan")
        return self._plan

    @property
    def model(self) -> nn.Module:
        """The patched model, which the report does not keep alive."""
        return self._swaps.model

    @property
    def active(self) -> bool:
        """Whether the swaps are in place: False after ``revert`` or when every op is off."""
        return self._swaps.active

    @property
    def switches(self) -> dict[str, bool]:
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
        return PatchReport(self._plan or later._plan, [*self.rows, *later.rows], swaps, self.own)

    def to_dict(self) -> dict[str, object]:
        plan = self._plan
        proved: dict[str, object] = {}
        if plan is not None:
            proved = {
                "family": plan.model_type,
                "plan": plan.digest(self.own.refused),
                "whole_error": plan.whole_error,
                "proof_seconds": round(plan.seconds, 3),
                "own_weights": asdict(self.own),
            }
        ops = [asdict(row) for row in self.rows]
        return {"family": None, **proved, "transformers": transformers.__version__, "ops": ops}

    def __str__(self) -> str:
        plan = self._plan
        name = f" for {plan.model_type}" if plan else ""
        proof = ""
        if plan and plan.whole_error is not None:
            proof = f", proved in {plan.seconds + self.own.seconds:.1f} s"
        lines = [f"kernels{name} (transformers {transformers.__version__}{proof})"]
        width = max(len(row.op) for row in self.rows)
        for row in self.rows:
            what = f"{', '.join(row.kernels)} in {row.num_modules} modules" if row.kernels else ""
            proof = f"proved to {row.error:.0e}" if row.error is not None else ""
            detail = "; ".join(part for part in (what, *row.found, proof, row.reason) if part)
            start = f"  {row.op:<{width}}  {row.status:<3}  "
            lines += textwrap.wrap(
                start + detail, _WIDTH, subsequent_indent=" " * (width + 4), break_long_words=False
            )
        if str(self.own):
            lines.append(f"  modules: {self.own}")
        return "\n".join(lines)

    __repr__ = __str__


def patch_kernels(
    model: nn.Module, kernels: bool | Mapping[str, bool] = True, plan: Plan | None = None
) -> PatchReport:
    """Swap the kernels of the model's plan into a loaded causal language model, in place.

    ``trainkit.patch`` does this and fuses adapters, too.

    Args:
        model: any causal language model of transformers, bare or wrapped by peft; before DeepSpeed,
            DDP or FSDP wrap it.
        kernels: True for all, False for none, or ``{"rope": False, ...}``; an op that is not
            mentioned is on where it is proved.
        plan: of a model of the same classes and settings, whose modules are not run again; None
            finds it.

    Returns:
        The report, with ``revert()``.
    """
    causal_lm = outermost(model)
    wanted = _switches(kernels)
    if any(isinstance(module, KernelForward) for module in model.modules()):
        raise PatchError(
            "the model is already patched", fix="call revert() on the first patch's report"
        )
    on = [op for op in OPS if wanted[op] != "off"]
    if not on:
        return PatchReport(
            None, [PatchRow(op, "off", "switched off") for op in OPS], Swaps(model, {})
        )
    refuse_replaced(causal_lm)
    proves = plan is None
    plan = plan_for(causal_lm) if plan is None else plan
    swaps, numbers, plain = plan.swaps(model, on)
    own = OwnProof()
    if proves:
        keys = {module: plan.call_keys(module) for module in swaps}
        calls = {m: plan.calls.get(exact, plan.calls.get(key)) for m, (exact, key) in keys.items()}
        own = prove_instances(causal_lm, calls, swaps, plan.attention)
        if own.refused:
            swaps, numbers, plain = plan.swaps(model, on, without=own.left_out(causal_lm))
    rows = []
    for op in OPS:
        row = PatchRow(op, "off", "switched off")
        if op in on:
            row = _row(op, causal_lm, plan, numbers[op], plain[op], own)
        if row.status == "off" and wanted[op] == "named":
            raise PatchError(
                f"{op} cannot be switched on for {plan.model_type}: {row.reason}", where="kernels"
            )
        rows.append(row)
    return PatchReport(plan, rows, Swaps(model, swaps), own)


_USES = {
    "add_rms_norm": ("add_rms_norm",),
    "add_layer_norm": ("add_layer_norm",),
    "rope": ("apply_rope",),
    "linear_cross_entropy": ("linear_cross_entropy",),
}
"""The kernels of ops whose forwards run several."""


def _row(
    op: str, model: nn.Module, plan: Plan, number: int, num_others: int, own: OwnProof
) -> PatchRow:
    findings = [(kind, each) for kind, each in plan.findings(op) if each.detail]
    by_verdict: dict[str, list[str]] = {"on": [], "no kernel": [], "refused": []}
    for kind, each in findings:
        text = f"{kind}: {each.detail}"
        if text not in by_verdict[each.verdict]:
            by_verdict[each.verdict].append(text)
    reasons = [*by_verdict["refused"], *by_verdict["no kernel"]]
    if num_others:
        first = next((f" ({name} is {why})" for name, why in own.refused.items()), "")
        what = "weights" if first else "settings"
        reasons.append(f"{num_others} modules whose {what} are not those proved{first}")
    dropped = plan.dropped.get(op)
    if op == "rope" and "read together" in plan.dropped:
        reasons.append(f"q, k and v are read one by one: {plan.dropped['read together']}")
    no_head = why_no_loss_head(model) if op == "linear_cross_entropy" else None
    if no_head:
        return PatchRow(op, "off", no_head)
    if not number or dropped:
        reason = "; ".join([dropped] if dropped else reasons) or plan.missing.get(op)
        return PatchRow(op, "off", reason or "the modules are not those that were proved")
    on = [each for _, each in findings if each.verdict == "on"]
    uses = dict.fromkeys(name for each in on if each.forward for name in each.uses)
    errors = [each.error for each in on if each.error is not None]
    bits = [each.bits for each in on if each.bits is not None]
    return PatchRow(
        op,
        "on",
        "; ".join(f"plain: {reason}" for reason in reasons),
        tuple(uses) or _USES[op],
        number,
        tuple(by_verdict["on"]),
        max(errors, default=plan.whole_error),
        max(bits, default=None),
    )


def refuse_unknown(names: Iterable[str], known: Sequence[str]) -> None:
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


_FOREIGN = "liger_kernel"


def refuse_replaced(model: nn.Module) -> None:
    """Refuse a process in which another library has replaced the model's classes or functions."""
    candidates: dict[str, object] = {"torch.nn.functional.cross_entropy": functional.cross_entropy}
    for kind in {type(module) for module in model.modules()}:
        modeling = sys.modules.get(kind.__module__)
        if not kind.__module__.startswith("transformers.models.") or modeling is None:
            continue
        found = getattr(modeling, kind.__name__, kind)
        if found.__module__ != modeling.__name__:
            raise PatchError(
                f"{kind.__name__} has been replaced by {found.__module__}.{found.__qualname__}",
                where=modeling.__name__,
                fix="use one kernel library at a time: load the model in a fresh process without "
                "it",
            )
        candidates |= {
            f"{modeling.__name__}.{name}": value
            for name, value in vars(modeling).items()
            if callable(value)
        }
    for name, function in candidates.items():
        if (getattr(function, "__module__", None) or "").startswith(_FOREIGN):
            raise PatchError(
                f"Liger has already replaced {name} in this process",
                fix="do not apply Liger (or `use_liger_kernel`) together with trainkit's kernels",
            )
