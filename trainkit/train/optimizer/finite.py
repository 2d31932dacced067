"""No number that is none gets into the weights.

Every step's losses and gradient norm are looked at on the device and by all ranks together. The
verdict gates the update on the device, and is copied to the host while the computation goes on: the
host reads that of one step while the device works on the next, so no step waits. Before the step of
an optimizer that cannot be gated, and on a CPU, it is read at once.

A loss that spikes is made NaN before its gradients are taken: whatever holds back a step with NaN
(a fused optimizer, a loss scaler, DeepSpeed) then holds back this one too.
"""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import TrainingArguments

from trainkit.errors import TrainkitError
from trainkit.parallel.engine import Ranks
from trainkit.parallel.parameters import all_ranks
from trainkit.places import checkpoints_in
from trainkit.run.going_on import resume_command
from trainkit.train.faults.bad_numbers import BadBatch, NumberPolicy, split, write_batch
from trainkit.train.faults.signals import StopRequest
from trainkit.train.run import Run

MAX_SKIPPED = 40
"""fp16 steps skipped in a row before the run ends. The loss scale begins at 2**16 and halves each
time: after 40 it is 2**-24, fp16's smallest number, and no loss is left to scale."""

_NUM_NAMED = 8
"""Rows that a message names before it only counts them."""


class NumberError(TrainkitError):
    """A loss, a gradient or a weight is NaN or infinite, or a loss spikes.

    Attributes:
        step: of the update that must not be made, or has made such weights.
    """

    step = 0

    @classmethod
    def at(cls, step: int, what: str, *, where: str | None = None, fix: str) -> "NumberError":
        """The error of a step."""
        error = cls(what, where=where, fix=fix)
        error.step = step
        return error


@dataclass
class _Step:
    """What is known of a step: its rows now, its numbers when the device has come to them."""

    step: int = 0
    samples: list[Sequence[Any]] = field(default_factory=list)
    """Per micro-batch of this rank."""
    batches: Sequence[Mapping[str, Any]] = ()
    """The micro-batches, on the host."""
    losses: list[torch.Tensor] = field(default_factory=list)
    mean: torch.Tensor | None = None
    """The step's loss over all ranks, where spikes are looked for."""
    limit: float = float("inf")
    spikes: torch.Tensor | None = None
    forgives_gradients: bool = False
    numbers: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    """On the host: the verdicts on loss and gradient, a wish to stop, whether the loss spikes, the
    step's loss, the norm, and the loss of each micro-batch."""
    ready: torch.cuda.Event | None = None
    listed: list[float] = field(default_factory=list)
    """The losses, once they are read."""
    norm: float = 0.0


class NumberGuard:
    """Watches the losses and the gradient norm of every step, on every rank.

    Args:
        ranks: the processes.
        sample_name: what to call a sample, ``file:line``.
        where: the run directory, for messages.
        advice: what to do about a loss or gradient that is not finite.
        stop: a wish of any rank to stop, which all learn of with the verdict.
        policy: what to do about a bad step.
        keep: writes down the batch of a bad step; returns what to tell of it.
        tell: warns the user.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        sample_name: Callable[[Any], str],
        where: str,
        advice: Callable[[], str],
        stop: StopRequest,
        policy: NumberPolicy | None = None,
        keep: Callable[[BadBatch], str] = lambda _: "",
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._policy = policy or NumberPolicy()
        self._keep, self._tell = keep, tell
        self._stop = stop
        self._ranks = ranks
        self._sample_name = sample_name
        self._where = where
        self._advice = advice
        self._current = _Step()
        self._unread: _Step | None = None
        self._latest = _Step()
        """The last one that was read."""
        self.is_held = False
        """Whether that one must not be taken."""
        self.left_out = torch.zeros(())
        """0-d on the device: 1 where the step closed last does not count, its loss neither."""
        self._skipped_in_a_row = 0
        self.num_skipped = 0
        """fp16 steps without an update since `take_skipped`."""

    def begin(
        self,
        samples: list[Sequence[Any]],
        batches: Sequence[Mapping[str, Any]] = (),
        *,
        step: int = 0,
    ) -> None:
        """A step begins with the samples of these micro-batches."""
        self._current = _Step(step=step, samples=samples, batches=batches)

    def rows_of(self, batch: Mapping[str, Any] | None) -> list[str]:
        """The rows of a micro-batch of the current step, by name."""
        for samples, each in zip(self._current.samples, self._current.batches, strict=False):
            if each is batch:
                return [self._sample_name(sample) for sample in samples]
        return []

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """What ``training.debug`` stops at is a number that is none, like any other."""
        try:
            yield
        except ValueError as error:
            if "DebugUnderflowOverflow" not in str(error):
                raise
            raise NumberError(
                "training.debug has met NaN or infinity in the forward pass; the lines above name "
                "the modules, the last of them first to have it",
                where=self._where,
                fix=self._advice(),
            ) from error

    def add_loss(self, loss: torch.Tensor) -> torch.Tensor | None:
        """The next micro-batch's part of the step's loss; nothing waits for it.

        Returns:
            Where the step must not be taken, as its loss says: NaN, by which the loss is to be
            multiplied before its gradients are taken; else 1, or None where nobody asks.
        """
        current, policy = self._current, self._policy
        current.losses.append(loss.detach())
        is_known = current.step in policy.passed_over
        if len(current.losses) < len(current.samples) or not (policy.spike or is_known):
            return None
        self._read()  # the limit is that of the steps before
        device = self._ranks.device
        mean = torch.stack([x.float().reshape(()) for x in current.losses]).sum().to(device)
        if self._ranks.num_processes > 1:
            torch.distributed.all_reduce(mean)
            mean = mean / self._ranks.num_processes
        current.mean, current.limit = mean, policy.limit
        current.spikes = torch.full_like(mean, True) if is_known else (mean > current.limit).float()
        return torch.where(current.spikes > 0, torch.nan, torch.ones_like(mean))

    def close(
        self, step: int, grad_norm: torch.Tensor | float | None, *, forgives_gradients: bool
    ) -> torch.Tensor:
        """The gradients of a step are complete; the verdict on the step before is read.

        All ranks call it at the same step.

        Args:
            step: its number, from 1.
            grad_norm: over all parameters and ranks; None where nobody computes it.
            forgives_gradients: a loss scaler skips the update by itself and tries a smaller scale.

        Returns:
            0-d float32 on the device: 1 where this step must not be taken.

        Raises:
            NumberError: the step before (on a CPU: this one) is bad, and the run is to stop.
        """
        current, device = self._current, self._ranks.device
        current.step, current.forgives_gradients = step, forgives_gradients
        norm = torch.as_tensor(0.0 if grad_norm is None else grad_norm, device=device).detach()
        losses = torch.stack(
            [all_ranks(norm).float().reshape(()), *(x.float().reshape(()) for x in current.losses)]
        )
        is_bad = ~losses.isfinite()
        # DeepSpeed says -1 for a norm that is not finite.
        flags = (is_bad[1:].any(), is_bad[0] | (losses[0] < 0))
        wish = torch.full((), float(self._stop.number), device=device)
        verdict = torch.stack((*(flag.float() for flag in flags), wish))
        if self._ranks.num_processes > 1:
            torch.distributed.all_reduce(verdict, torch.distributed.ReduceOp.MAX)
        none = torch.zeros_like(wish)
        spikes = none if current.spikes is None else current.spikes
        mean = none if current.mean is None else current.mean
        self.left_out = torch.maximum(verdict[0], spikes)
        if not forgives_gradients:
            self.left_out = torch.maximum(self.left_out, verdict[1])
        numbers = torch.cat((verdict, torch.stack((spikes, mean)), losses))
        current.losses.clear()
        if device.type == "cuda":
            host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            current.numbers = host.copy_(numbers, non_blocking=True)
            current.ready = torch.cuda.Event()
            current.ready.record()
        else:
            current.numbers = numbers.cpu()
        self._read()
        self._unread = current
        if current.ready is None:
            self._read()
        return verdict[:2].max()

    def flush(self) -> None:
        """Wait for the last step's verdict; before anything is saved, logged or evaluated.

        Raises:
            NumberError: it has a number that is none.
        """
        self._read()

    def take_skipped(self) -> int:
        """fp16 steps without an update since the last call."""
        count, self.num_skipped = self.num_skipped, 0
        return count

    def _read(self) -> None:
        step, self._unread = self._unread, None
        if step is None:
            return
        if step.ready is not None:
            # Recorded a whole step ago: the device has its next step queued behind it.
            step.ready.synchronize()
        bad_loss, bad_gradient, wish, spikes, mean, norm, *losses = step.numbers.tolist()
        step.listed, step.norm, self._latest = losses, norm, step
        self._stop.agreed = int(wish)
        policy = self._policy
        if step.step in policy.passed_over:
            self.is_held = True
            self.num_skipped += 1
            policy.leave_out(is_new=False)
            return
        forgiven = bool(bad_gradient) and step.forgives_gradients and not (bad_loss or spikes)
        self.num_skipped += forgiven
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if forgiven else 0
        self.is_held = bool(bad_loss or spikes or (bad_gradient and not forgiven))
        if self._skipped_in_a_row > MAX_SKIPPED:
            raise self._error(step, "scale")
        if self.is_held:
            kind = "loss" if bad_loss else "spike" if spikes else "gradient"
            self._decide(step, kind, mean)
        elif forgiven:
            policy.num_steps += 1
        else:
            policy.take(mean)

    def _decide(self, step: _Step, kind: str, mean: float) -> None:
        """A step is bad: go on without it, or raise."""
        policy = self._policy
        error = self._error(step, kind, mean)
        kept = self._keep_batch(step, kind, error)
        if policy.on_bad == "skip" and policy.in_a_row < policy.max_skips:
            policy.leave_out(is_new=True)
            self.num_skipped += 1
            self._tell(f"{error.what}; step {step.step} is skipped{kept}")
            return
        if policy.on_bad == "skip":
            what = f"{error.what}; faults.max_skips ({policy.max_skips}) steps before it were "
            error = NumberError.at(
                step.step, f"{what}skipped already", where=error.where, fix=str(error.fix)
            )
        raise error

    def keep_latest(self, error: NumberError) -> None:
        """Write down the last step's batch: behind its update the weights are not finite."""
        self._keep_batch(self._latest, "weights", error)

    def _keep_batch(self, step: _Step, kind: str, error: NumberError) -> str:
        tensors, extras = zip(*map(split, step.batches), strict=True) if step.batches else ((), ())
        bad = BadBatch(
            step=step.step,
            dist_rank=self._ranks.process_index,
            kind=kind,
            says=error.what,
            losses=step.listed,
            grad_norm=step.norm,
            limit=step.limit,
            rows=[[self._sample_name(each) for each in rows] for rows in step.samples],
            batches=tensors,
            extras=extras,
        )
        return self._keep(bad) if step.batches else ""

    def _error(self, step: _Step, kind: str, mean: float = 0.0) -> NumberError:
        """What happened and in which rows; all ranks are here."""
        losses = step.listed
        bad = [number for number, loss in enumerate(losses) if not _is_finite(loss)]
        mine = [
            (losses[number], [self._sample_name(s) for s in step.samples[number]])
            for number in (bad if kind == "loss" else range(min(len(losses), len(step.samples))))
        ]
        found = gather_object(mine) if self._ranks.num_processes > 1 else mine
        names = list(dict.fromkeys(name for _, rows in found for name in rows))
        if kind == "loss":
            what = f"loss is {found[0][0] if found else 'not finite'} at step {step.step}"
            rows = "in the micro-batch with" if len(found) == 1 else "in the micro-batches with"
        elif kind == "spike":
            what = f"loss spikes to {mean:.4g} at step {step.step}"
            rows = f"{self._policy.describe_limit()}{step.limit:.4g}; the step had"
        elif kind == "scale":
            what = f"{self._skipped_in_a_row} steps in a row, up to step {step.step}, were skipped"
            rows = "because no loss scale keeps the gradients within fp16; the last step had"
        else:
            what = f"grad_norm is {step.norm} at step {step.step}"
            rows = "and every loss is finite; the step had"
        listed = ", ".join(names[:_NUM_NAMED])
        more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
        listing = f" ({rows} {listed}{more})" if names else ""
        return NumberError.at(
            step.step,
            f"{what}{listing}; the weights were not updated with it",
            where=self._where,
            fix=self._advice(),
        )


def guard_of(run: Run, ranks: Ranks) -> NumberGuard:
    """The guard over a run's steps."""
    root = Path(str(run.args.output_dir))

    def keep(bad: BadBatch) -> str:
        """Write down a bad step's batch; a disk that refuses it must not hide what happened."""
        try:
            return f"; its batch is kept in {write_batch(root, bad)}"
        except (OSError, TrainkitError) as error:
            return f"; its batch could not be kept: {error}"

    return NumberGuard(
        ranks,
        sample_name=run.data.train.sample_name,
        where=str(root),
        advice=lambda: number_advice(run.args),
        stop=run.stop,
        policy=run.numbers,
        keep=keep,
        tell=run.console.warn,
    )


def _is_finite(value: float) -> bool:
    return abs(value) < float("inf")


def number_advice(args: TrainingArguments) -> str:
    """What to do about a number that is none, as commands."""
    lower = f"training.learning_rate={args.learning_rate / 2:g}"
    run = Path(str(args.output_dir))
    resume = resume_command(run, lower)
    start = resume if checkpoints_in(run) else f"there is no checkpoint yet: {lower}"
    return (
        f"{shlex.join(['trainkit', 'diagnose', str(run)])} names what is at fault; look at the "
        f"rows that are named, or go on with a lower learning rate ({start}); "
        "faults.on_bad_numbers=skip goes on without such a step"
    )


def hold_back(
    optimizer: Any,
    found_inf: torch.Tensor,
    wait: Callable[[], None],
    is_held: Callable[[], bool] = lambda: False,
) -> None:
    """See that the next ``step`` of ``optimizer`` is not taken where ``found_inf`` is 1.

    torch's fused optimizers take the flag on the device and leave weights and state as they are.
    Others would go on with their momentum and decay whatever the gradients: the host waits for the
    verdict, and takes the gradients away; without one no optimizer touches a weight.

    Args:
        optimizer: the one whose ``step`` comes next, not wrapped.
        found_inf: 0-d float32 on the device.
        wait: for the verdict; raises where the run must stop.
        is_held: the verdict.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.found_inf, optimizer.grad_scale = found_inf, None
        return
    wait()
    if is_held():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
