"""No number that is none gets into the weights.

Every step's losses and gradient norm are looked at on the device and by all ranks together. The
verdict gates the update on the device, and is copied to the host while the computation goes on: the
host reads that of one step while the device works on the next, so no step waits. Before the step of
an optimizer that cannot be gated, and on a CPU, it is read at once.

A loss that spikes is made NaN before its gradients are taken: whatever holds back a step with NaN
(a fused optimizer, a loss scaler, DeepSpeed) then holds back this one too.
"""

from __future__ import annotations

import json
import math
import shlex
import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from transformers import TrainingArguments

from trainkit.checkpoint.weights.contents import taking_up
from trainkit.errors import RunDirectoryError, TrainkitError
from trainkit.parallel.engine import Fetched, Ranks
from trainkit.parallel.parameters import all_ranks
from trainkit.places import checkpoints_in
from trainkit.run.files import jsonable, write_bytes_atomic
from trainkit.run.status import resume_command
from trainkit.train.faults.signals import StopRequest

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
    overrides: tuple[str, ...] = ()

    @classmethod
    def at(cls, step: int, what: str, *, where: str | None = None, fix: str) -> NumberError:
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
    numbers: Fetched = field(default_factory=lambda: Fetched(torch.zeros(0)))
    """The verdicts on loss and gradient, a wish to stop, whether the loss spikes, the step's loss,
    the norm, and the loss of each micro-batch."""
    listed: list[float] = field(default_factory=list)
    """The losses, once they are read."""
    norm: float = 0.0


class NumberGuard:
    """Watches the losses and the gradient norm of every step, on every rank."""

    def __init__(
        self,
        args: TrainingArguments,
        ranks: Ranks,
        sample_name: Callable[[Any], str],
        stop: StopRequest,
        policy: NumberPolicy,
        tell: Callable[[str], None],
    ) -> None:
        self._args, self._ranks, self._sample_name = args, ranks, sample_name
        self._stop, self._policy, self._tell = stop, policy, tell
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
                where=str(self._args.output_dir),
                fix=number_advice(self._args),
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
        self.flush()  # the limit is that of the steps before
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
        current.numbers = Fetched(numbers)
        self.flush()
        self._unread = current
        if device.type != "cuda":
            self.flush()
        return verdict[:2].max()

    def take_skipped(self) -> int:
        """fp16 steps without an update since the last call."""
        count, self.num_skipped = self.num_skipped, 0
        return count

    def flush(self, until: int | None = None) -> None:
        """Wait for the last step's verdict; before anything is saved, logged or evaluated."""
        step = self._unread
        if step is None or (until is not None and step.step > until):
            return
        self._unread = None
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
        policy = self._policy
        error = self._error(step, kind, mean)
        kept = self.keep_batch(error, kind, step)
        if policy.on_bad != "skip":
            raise error
        if policy.in_a_row >= policy.max_skips:
            what = f"{error.what}; faults.max_skips ({policy.max_skips}) steps before it were "
            raise NumberError.at(
                step.step, f"{what}skipped already", where=error.where, fix=str(error.fix)
            )
        policy.leave_out(is_new=True)
        self.num_skipped += 1
        self._tell(f"{error.what}; step {step.step} is skipped{kept}")

    def keep_batch(
        self, error: NumberError, kind: str = "weights", step: _Step | None = None
    ) -> str:
        """Write a step's batch down; a disk that refuses it must not hide what happened.

        Without a step it is the last one: behind its update the weights are not finite.
        """
        step = step or self._latest
        if not step.batches:
            return ""
        tensors, extras = zip(*map(split, step.batches), strict=True)
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
        try:
            return f"; its batch is kept in {write_batch(Path(str(self._args.output_dir)), bad)}"
        except (OSError, TrainkitError) as problem:
            return f"; its batch could not be kept: {problem}"

    def _error(self, step: _Step, kind: str, mean: float = 0.0) -> NumberError:
        losses = step.listed
        bad = [number for number, loss in enumerate(losses) if not math.isfinite(loss)]
        mine = [
            (losses[number], [self._sample_name(s) for s in step.samples[number]])
            for number in (bad if kind == "loss" else range(min(len(losses), len(step.samples))))
        ]
        found = gather_object(mine)
        names = list(dict.fromkeys(name for _, rows in found for name in rows))
        if kind == "loss":
            what = f"loss is {found[0][0] if found else 'not finite'} at step {step.step}"
            rows = "in the micro-batch with" if len(found) == 1 else "in the micro-batches with"
        elif kind == "spike":
            what = f"loss spikes to {mean:.4g} at step {step.step}"
            policy = self._policy
            rows = (
                f"the median of the last {policy.window} steps is {policy.median:.4g}, "
                f"faults.spike's limit {step.limit:.4g}; the step had"
            )
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
            where=str(self._args.output_dir),
            fix=number_advice(self._args),
        )


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


# What a run does about a step whose numbers are bad, and what it remembers to decide it.
#
# All of it is decided from numbers that every rank has, so all ranks decide alike; and it is saved
# with each checkpoint, so that a continued run decides as the unbroken one.


_FILE = "numbers.json"

_SMALLEST_SHARE = 0.01
"""Of the median: the least that the median distance counts as. A loss that hardly moves is no
reason to call its next small step a spike."""


@dataclass
class NumberPolicy:
    """The recipe's rules about bad numbers, and the steps so far.

    Attributes:
        on_bad: stop, skip or roll_back.
        max_rollbacks: how often the run may go back.
        spike: see `limit`; None watches for no spike.
        passed_over: steps whose update is left out whatever their numbers: the run has gone back
            to before them.
        in_a_row: steps skipped since the last that was taken.
        num_steps, num_left_out: since the last logged row, and those of them without an update
            whose loss is not in the row's mean.
    """

    on_bad: str = "stop"
    max_skips: int = 5
    max_rollbacks: int = 3
    spike: float | None = None
    window: int = 100
    passed_over: frozenset[int] = frozenset()
    in_a_row: int = 0
    num_steps: int = 0
    num_left_out: int = 0
    _losses: list[float] = field(default_factory=list)

    @property
    def leaves_out(self) -> bool:
        """Whether the run may go on behind a step without its update."""
        return self.on_bad == "skip" or bool(self.passed_over)

    @property
    def goes_back(self) -> bool:
        """Whether the run may go back once more."""
        return self.on_bad == "roll_back" and len(self.passed_over) < self.max_rollbacks

    @property
    def median(self) -> float:
        """Of the last steps' losses."""
        return statistics.median(self._losses)

    @property
    def limit(self) -> float:
        """The loss above which the next step spikes: median + spike x MAD of the last steps."""
        if self.spike is None or len(self._losses) < self.window:
            return float("inf")
        median = self.median
        distance = statistics.median(abs(loss - median) for loss in self._losses)
        return median + self.spike * max(distance, _SMALLEST_SHARE * abs(median))

    def take(self, loss: float) -> None:
        """A step was taken; ``loss`` is its mean over the ranks."""
        self.num_steps += 1
        self.in_a_row = 0
        if self.spike is not None:
            self._losses.append(loss)
            del self._losses[: -self.window]

    def leave_out(self, *, is_new: bool) -> None:
        """A step was not taken; ``is_new``: nobody knew that it would not."""
        self.num_steps += 1
        self.num_left_out += 1
        self.in_a_row += is_new

    def take_counts(self) -> tuple[int, int]:
        """``num_steps`` and ``num_left_out``, which begin at 0 again."""
        counts = self.num_steps, self.num_left_out
        self.num_steps = self.num_left_out = 0
        return counts

    def save(self, directory: Path) -> None:
        values = {
            "in_a_row": self.in_a_row,
            "num_steps": self.num_steps,
            "num_left_out": self.num_left_out,
            "losses": self._losses,  # JSON keeps every bit of a float
        }
        (directory / _FILE).write_text(json.dumps(values), encoding="utf-8")

    def load(self, directory: Path) -> None:
        """From a checkpoint; one of a run without such rules has nothing to tell."""
        path = directory / _FILE
        if not path.is_file():
            return
        with taking_up(path):
            values = json.loads(path.read_text(encoding="utf-8"))
            names = ("in_a_row", "num_steps", "num_left_out")
            self.in_a_row, self.num_steps, self.num_left_out = (int(values[key]) for key in names)
            self._losses = [float(loss) for loss in values["losses"]][-self.window :]


# The batch of a step whose numbers are bad, kept for `trainkit diagnose`: no pickle.
#
# Each rank writes one safetensors file: the tensors of its micro-batches, and, as JSON in the
# header, their rows, their losses and why the step is bad.

FOLDER = "bad_batches"
WEIGHTS = "weights"
"""Inside the folder of a step that ended the run: the weights it met."""

_KEPT = 20
"""Steps whose batches stay: a run that skips now and then must not fill the disk."""


@dataclass(frozen=True)
class BadBatch:
    """What one rank knows of a bad step.

    Attributes:
        kind: loss, gradient, spike or weights: what was bad.
        losses: of the micro-batches, each its part of the step's loss.
        rows: the samples of each micro-batch, ``file:line`` where that is known.
        extras: what else they hold, by name: plain values.
    """

    step: int
    dist_rank: int
    kind: str
    says: str
    losses: Sequence[float]
    grad_norm: float
    limit: float
    rows: Sequence[Sequence[str]]
    batches: Sequence[Mapping[str, torch.Tensor]] = field(repr=False)
    extras: Sequence[Mapping[str, Any]] = ()


def split(batch: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
    plain = (str, int, float, bool, list, type(None))
    return tensors, {k: v for k, v in batch.items() if k not in tensors and isinstance(v, plain)}


def folder_of(run: Path, step: int) -> Path:
    return run / FOLDER / f"step-{step}"


def write_batch(run: Path, bad: BadBatch) -> Path:
    """Keep this rank's part; returns the step's folder."""
    folder = folder_of(run, bad.step)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{number}.{name}": value.detach().cpu().contiguous().clone()
        for number, batch in enumerate(bad.batches)
        for name, value in batch.items()
    }
    about = {key: value for key, value in vars(bad).items() if key != "batches"}
    text = json.dumps(jsonable(about), ensure_ascii=False)
    data = save(tensors, metadata={"bad_batch": text})
    path = folder / f"rank{bad.dist_rank}.safetensors"
    write_bytes_atomic(path, data)
    if bad.dist_rank == 0:
        for old in steps_kept(run)[:-_KEPT]:
            shutil.rmtree(folder_of(run, old), ignore_errors=True)
    return folder


def steps_kept(run: Path) -> list[int]:
    """The steps whose batches were kept, in order."""
    names = (path.name.removeprefix("step-") for path in (run / FOLDER).glob("step-*"))
    return sorted(int(name) for name in names if name.isdigit())


def read_batches(folder: Path) -> list[BadBatch]:
    """What the ranks kept of a step, in order."""
    found = []
    for path in sorted(folder.glob("rank*.safetensors"), key=lambda p: (len(p.name), p.name)):
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})["bad_batch"])
                batches: list[dict[str, torch.Tensor]] = [{} for _ in about["rows"]]
                for key in file.keys():  # noqa: SIM118 - no mapping
                    number, _, name = key.partition(".")
                    batches[int(number)][name] = file.get_tensor(key)
            about["losses"] = [float(loss) for loss in about["losses"]]
            about |= {key: float(about[key]) for key in ("grad_norm", "limit")}
            found.append(BadBatch(**about, batches=batches))
        except (SafetensorError, OSError, ValueError, LookupError, TypeError) as error:
            raise RunDirectoryError(
                f"this is not a batch that a run has kept: {error}",
                where=str(path),
                fix="delete its folder, and go on with the run: what is bad again is kept again",
            ) from error
    if not found:
        raise RunDirectoryError("no batch is kept here", where=str(folder))
    return found
