"""Proves a patched model before it trains: each op at the model's shapes, then the whole.

The ops and their composition are checked on a one-layer replica: the model's own classes, sizes,
dtype and device, random weights, a few of its experts; on a CPU a short row and a part of the
vocabulary. That works however the model itself is held (sharded by ZeRO-3, quantised, offloaded),
needs no memory for a second model, and lets every gradient be compared. Each op is measured on the
calls that the model makes, by the contract of every op (``trainkit.kernels.contract``). The model
itself, with its weights, then makes one forward pass patched and one plain.
"""

from __future__ import annotations

import dataclasses
import gc
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainkit import kernels
from trainkit.errors import PatchError, ProofError
from trainkit.evaluation_mode import evaluation_mode
from trainkit.kernels import contract, ops
from trainkit.kernels.contract import OpCase, OpError, OpSpec
from trainkit.kernels.launch import runs_kernel
from trainkit.kernels.linear_cross_entropy.function import CountedLoss
from trainkit.models.attention.proof import has_experts
from trainkit.models.patch import PatchReport, PatchRow, patch_kernels
from trainkit.models.proof.replica import CPU_VOCABULARY, VOCABULARY, cast, known, make_replica
from trainkit.models.vision import loss_of_a_small_image
from trainkit.options.model import OPS
from trainkit.parallel.parameters import is_whole, where_it_computes

MAX_TOKENS = 512
"""Tokens of the batch that the check reads: kernels see full rows, logits stay small."""

CPU_TOKENS = 64
"""On a CPU the ops run their references, whatever the size: there the check reads so many."""

WORDS = (VOCABULARY, CPU_VOCABULARY)
"""How many tokens the replica knows, and how many where the GPU has no room for that next to the
model. The model's own pass reads all of the vocabulary."""


@dataclass(frozen=True)
class CheckRow:
    """One line of kernels.json.

    Args:
        op: the switch, or "replica" and "model" for the whole.
        family: the row of the table.
        kernel: the public function; empty for the whole.
        max_error: the largest relative error against the truth, of the output or gradient that
            comes nearest to its allowance.
        reference_error: the same for plain torch in the model's dtype: what is to be matched.
        speedup: plain torch's time over the kernel's, on a GPU, host time included. At
            ``MAX_TOKENS`` tokens most of it is launches.
        status: "ok", "failed", "off", "skipped", or "reference" where the op, on a CPU, ran its
            reference: then the row shows that it is wired up, and nothing about a kernel.
        detail: the tensor in question, or the reason.
    """

    op: str
    family: str
    kernel: str
    max_error: float | None
    reference_error: float | None
    speedup: float | None
    status: str
    detail: str


class SelfCheckError(PatchError, ProofError):
    """A kernel is less exact than the plain model."""

    part = "self_check"

    def __init__(self, rows: list[dict[str, object]], failed: CheckRow) -> None:
        self.rows = rows
        if failed.kernel:
            what, switch = failed.kernel, f"`kernels: {{{failed.op}: false}}`"
        else:
            what, switch = f"the patched {failed.op}", "`kernels: false`"
        super().__init__(
            f"the self-check failed: {what} {failed.detail}",
            where=f"kernels, family {failed.family}",
            fix=f"train with {switch}, and report this with the run's kernels.json",
        )


def self_check(
    model: nn.Module, report: PatchReport, batch: Mapping[str, Tensor]
) -> list[dict[str, object]]:
    """Check every op that is on, then the model; call it right after ``patch``.

    Args:
        model: the patched model, on the device where it will train if that is to be proved.
        report: what ``patch`` returned for it.
        batch: ``input_ids`` and, if there are any, ``labels``, each (B, S); the first
            ``MAX_TOKENS`` tokens of the first row (``CPU_TOKENS`` on a CPU) are read as one
            document.

    Returns:
        The rows of kernels.json, one op each, then "replica" and "model".
    """
    tokens = _tokens_of(batch, where_it_computes(model)[0])
    rows = [
        CheckRow(row.op, report.plan.model_type, "", None, None, None, "off", row.reason)
        for row in report.rows
        if row.op in OPS and row.status == "off"
    ]
    if report.active:
        rows += _check_on_replica(model, report, tokens)
        rows.append(_check_model(model, report, tokens))
    order = (*OPS, "replica", "model")
    rows.sort(key=lambda row: order.index(row.op))
    results = [asdict(row) for row in rows]
    for row in rows:
        if row.status == "failed":
            raise SelfCheckError(results, row)
    return results


def _check_on_replica(
    model: nn.Module, report: PatchReport, tokens: Mapping[str, Tensor]
) -> list[CheckRow]:
    """The rows of the ops and of the replica, with as much of the vocabulary as there is room for.

    A model that trains within the GPU's memory must not be stopped by the check's own needs.
    """
    for vocabulary in WORDS:
        replica = None
        try:
            # A layer of 128, in fp64 with all gradients, took 28 GiB: more than training it.
            replica = make_replica(model, vocabulary, few_experts=True)
            known_tokens = known(tokens, replica)
            return [
                *_check_ops(replica, report, known_tokens),
                _check_replica(replica, report, known_tokens),
            ]
        except torch.OutOfMemoryError:
            replica = None
        gc.collect()  # the error's frames held tensors, and the replica's modules are a circle
        torch.cuda.empty_cache()
    reason = "the GPU has no room for a layer of its own next to the model"
    return [CheckRow("replica", report.plan.model_type, "", None, None, None, "skipped", reason)]


def _tokens_of(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    most = CPU_TOKENS if device.type == "cpu" else MAX_TOKENS
    input_ids = batch["input_ids"][:1, :most]
    labels = batch.get("labels", batch["input_ids"])[:1, :most]
    if not (labels[:, 1:] >= 0).any():
        labels = input_ids
    return {"input_ids": input_ids, "labels": labels}


def _check_ops(
    replica: PreTrainedModel, report: PatchReport, tokens: Mapping[str, Tensor]
) -> list[CheckRow]:
    on = [row for row in report.rows if row.op in OPS and row.status == "on"]
    again = patch_kernels(replica, report.switches, report.plan)
    try:
        with recorded([name for row in on for name in row.kernels]) as calls:
            _loss(replica, tokens)
            loss_of_a_small_image(replica)
    finally:
        again.revert()
    rows = []
    for row in on:
        mine = [call for call in calls if call.spec.name in row.kernels]
        rows.append(_check_op(row, report.plan.model_type, mine))
    return rows


def _check_op(row: PatchRow, family: str, calls: Sequence[Call]) -> CheckRow:
    """The op's worst error over its calls; the speed of its largest call."""
    kernel = ", ".join(row.kernels)
    if not calls:
        return CheckRow(row.op, family, kernel, None, None, None, "failed", "was never called")
    measured = [(error, call) for call in calls for error in errors_of(call)]
    # Not `>`: a NaN must come out as the worst.
    error, call = max(measured, key=lambda each: (not each[0].ok, each[0].ours))
    ran = all(call.ran_kernel for call in calls)
    largest = max(calls, key=lambda each: sum(t.numel() for t in each.tensors.values()))
    detail = f"{error.name} of {call}, {call.dtype}".replace("torch.", "")
    if not error.ok:
        status = "failed"
        detail = (
            f"is off by {error.ours:.2e} where plain torch is off by {error.eager:.2e}: {detail}"
        )
    else:
        status = "ok" if ran else "reference"
    return CheckRow(
        op=row.op,
        family=family,
        kernel=kernel,
        max_error=error.ours,
        reference_error=error.eager,
        speedup=speedup_of(largest) if largest.device.type == "cuda" else None,
        status=status,
        detail=detail,
    )


def _check_replica(
    replica: PreTrainedModel, report: PatchReport, tokens: Mapping[str, Tensor]
) -> CheckRow:
    """Loss and every gradient of the one-layer model, patched and plain, against a wider dtype."""
    if has_experts(replica):  # in 16 bits, two ways of rounding choose other experts
        cast(replica, torch.float32)
    dtype = next(replica.parameters()).dtype
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    plain = _loss_and_gradients(replica, tokens)
    again = patch_kernels(replica, report.switches, report.plan)
    try:
        patched = _loss_and_gradients(replica, tokens)
        coarse = {  # they round as often as the kernels, and the plain model does not
            name: ops.OPS[name].reference
            for row in report.rows
            if row.op in OPS and row.status == "on"
            for name in row.kernels
            if ops.OPS[name].roundings > 1
        }
        with _instead(coarse):
            rounded = _loss_and_gradients(replica, tokens) if coarse else plain
    finally:
        again.revert()
    truth = _loss_and_gradients(cast(replica, wide), tokens)
    worst = ("", 0.0, 0.0, -1.0)
    for name, exact in truth.items():
        ours = _relative_error(patched[name], exact)
        eager = max(_relative_error(each[name], exact) for each in (plain, rounded))
        # The two round at different places, and how that adds up in a gradient that nearly cancels
        # differs by a factor of two or three; each op by itself has been held to 1.05. A lone
        # number may be exact by luck, so the loss gets its own rounding.
        allowed = 4 * eager + contract.hair(dtype, worst=exact.dim() == 0)
        if not ours / allowed <= worst[3]:
            worst = (name, ours, eager, ours / allowed)
    name, ours, eager, ratio = worst
    size = replica.config.get_text_config().vocab_size
    detail = f"{name} of a one-layer replica in {dtype}, {size:,} tokens".replace("torch.", "")
    if not ratio <= 1.0:
        detail = f"is off by {ours:.2e} where the plain one is off by {eager:.2e}: {detail}"
    status = "ok" if ratio <= 1.0 else "failed"
    return CheckRow("replica", report.plan.model_type, "", ours, eager, None, status, detail)


def _check_model(model: nn.Module, report: PatchReport, tokens: Mapping[str, Tensor]) -> CheckRow:
    family = report.plan.model_type
    for parameter in model.parameters():
        if not is_whole(parameter):
            reason = "its weights are sharded: only the engine's own forward gathers them"
            return CheckRow("model", family, "", None, None, None, "skipped", reason)
    dtype = next(each.dtype for each in model.parameters() if each.is_floating_point())
    with evaluation_mode(model), torch.no_grad():
        patched = _loss(model, tokens).item()
        with report.suspended():
            plain = _loss(model, tokens).item()
    error = abs(patched - plain) / max(abs(plain), 1.0)
    # Rounding moves each token's loss by about an eps of the dtype, and a mean by less; in fp32
    # the sums behind it leave a few dozen eps.
    finfo = torch.finfo(dtype)
    allowed = finfo.eps if dtype in (torch.bfloat16, torch.float16) else 64 * finfo.eps
    if has_experts(model):  # a token near a tie may go to another expert
        allowed *= 4
    detail = f"loss {patched:.6f}, plain {plain:.6f}"
    if not error <= allowed:
        detail = f"has another loss than the plain one: {detail}"
    status = "ok" if error <= allowed else "failed"
    return CheckRow("model", family, "", error, None, None, status, detail)


def _relative_error(found: Tensor, exact: Tensor) -> float:
    """In the Euclidean norm; NaN stays NaN."""
    size = exact.double().norm().item()
    return (found.double() - exact.double()).norm().item() / (size or 1.0)


def _loss(model: nn.Module, tokens: Mapping[str, Tensor]) -> Tensor:
    device = next(model.parameters()).device
    return model(**{key: value.to(device) for key, value in tokens.items()}, use_cache=False).loss


def _loss_and_gradients(model: nn.Module, tokens: Mapping[str, Tensor]) -> dict[str, Tensor]:
    loss = _loss(model, tokens) + loss_of_a_small_image(model)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
    found = {name: g for (name, _), g in zip(named, gradients, strict=True) if g is not None}
    return {"loss": loss.detach(), **found}


_CALLED = {"linear_cross_entropy": "linear_cross_entropy_counted"}
"""What the forwards call, if it is not the op's own name in ``trainkit.kernels``."""

_TIMED_CALLS = 5


@dataclass(frozen=True)
class Call:
    """One call of an op as the model made it."""

    spec: OpSpec
    tensors: dict[str, Tensor]
    case: OpCase

    @property
    def ran_kernel(self) -> bool:
        """Whether these tensors run the Triton kernel, and not the reference."""
        return runs_kernel(*(each for each in self.tensors.values() if each.is_floating_point()))

    @property
    def dtype(self) -> torch.dtype:
        """Of the first tensor, which is what the op computes on."""
        return next(iter(self.tensors.values())).dtype

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device

    def __str__(self) -> str:
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in self.tensors.items())
        return f"{self.spec.name}({shapes})"


@contextmanager
def _instead(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Within, the model calls these, by their names in ``trainkit.kernels``."""
    before = {name: getattr(kernels, name) for name in functions}
    for name, function in functions.items():
        setattr(kernels, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(kernels, name, function)


@contextmanager
def recorded(names: Sequence[str]) -> Iterator[list[Call]]:
    """Within, the first call of each op with each combination of shapes is kept."""
    calls: list[Call] = []
    seen: set[object] = set()

    def recording(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            shapes = tuple(tuple(arg.shape) for arg in args if isinstance(arg, Tensor))
            if (name, shapes) not in seen:
                seen.add((name, shapes))
                calls.append(_bind(name, function, args, options))
            return function(*args, **options)

        return call

    called = {_CALLED.get(name, name): name for name in names}
    with _instead({key: recording(name, getattr(kernels, key)) for key, name in called.items()}):
        yield calls


def errors_of(call: Call) -> list[OpError]:
    return contract.measure(call.spec, call.case, call.dtype, call.device)


def speedup_of(call: Call) -> float:
    """The reference's time over the kernel's, forward and backward."""
    return _seconds(call, call.spec.reference) / _seconds(call, call.spec.function)


def _bind(
    name: str, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> Call:
    """The call with its arguments by name; options that only steer a kernel are left out."""
    spec = ops.OPS.get(name)
    if spec is None:
        raise PatchError(
            f"the op {name} has no spec, so nothing can check it",
            fix="register it in trainkit/kernels/ops.py",
        )
    bound = inspect.signature(spec.function).bind(*args, **options).arguments
    known = inspect.signature(spec.reference).parameters
    given = {key: value for key, value in bound.items() if key in known}
    tensors = {
        key: value.detach().clone() if value.dim() == 0 else value.detach()
        for key, value in given.items()
        if isinstance(value, Tensor)
    }
    case = OpCase(
        label="as the model calls it",
        inputs=lambda draw: tensors,
        grads=tuple(key for key in tensors if given[key].requires_grad),
        options={key: value for key, value in given.items() if key not in tensors},
    )

    def without_counts(**arguments: Any) -> Any:
        found = function(**arguments)
        return found.loss if isinstance(found, CountedLoss) else found

    return Call(dataclasses.replace(spec, function=without_counts), tensors, case)


def _seconds(call: Call, function: Callable[..., Any]) -> float:
    """The best of a few calls with their backward passes, by a clock around the waiting device."""
    best = float("inf")
    for _ in range(_TIMED_CALLS):
        _wait(call.device)
        start = time.perf_counter()
        contract.run(function, call.case, call.tensors, torch.ones_like)
        _wait(call.device)
        best = min(best, time.perf_counter() - start)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
