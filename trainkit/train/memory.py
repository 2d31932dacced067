"""The estimate of a run's memory and time: held against the GPU before the run, and measured in it.

``memory.json`` keeps both. On a CPU there is nothing to hold it against.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trainkit.errors import ModelError, TrainkitError
from trainkit.estimate.estimate import MEMORY_BAND, Estimate, estimate
from trainkit.estimate.gpus import GPUS, Gpu, gpu_named
from trainkit.estimate.peak import CONTEXT_GIB, GIB, RESERVED, peak
from trainkit.estimate.recipe import plan_of, replanning, uncounted
from trainkit.parallel.agreement import largest_of
from trainkit.parallel.process import ProcessRank
from trainkit.run import Console, RunDirectory
from trainkit.train.prepare import Invocation, Prepared

_UNKNOWN_GPU = "a100-80g"
"""Whose speed is taken for a GPU that the table does not have."""


def this_gpu() -> Gpu | None:
    """This process's GPU with the memory that it really has; None without one."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    row = gpu_named(name) or replace(GPUS[_UNKNOWN_GPU], name=name)
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return replace(row, memory_gib=total / GIB)


def expect(start: Invocation, prepared: Prepared) -> Estimate | None:
    """The estimate of a run on this process's GPU; None where there is none, or nobody can say.

    Raises:
        TrainkitError: the run cannot fit, and nobody insists.
    """
    gpu = None if start.recipe.training.get("use_cpu") else this_gpu()
    if gpu is None:
        return None
    try:
        plan = plan_of(start.recipe, start.process.world_size)
    except ModelError as error:
        start.console.note(f"memory: {error.what}")
        return None
    lengths = getattr(prepared.data.train.samples, "lengths", None)
    if not start.recipe.data.packing and lengths is not None and len(lengths):
        plan = replace(plan, length=min(plan.length, int(lengths.max())))
    replan = replanning(start.loaded, start.process.world_size)
    found = estimate(plan, gpu, notes=uncounted(start.recipe, plan.shape), replan=replan)
    _judge(found, start)
    return found


def _judge(found: Estimate, start: Invocation) -> None:
    """Refuse what cannot fit, warn of what may not."""
    gpu, needed = found.gpu, found.peak
    text = f"about {needed.gib:.1f} GiB of {gpu.memory_gib:.1f} GiB ({gpu.name}) at the peak"
    if found.fits:
        start.console.note(f"memory: {text}; about {found.tokens_per_second:,.0f} tokens/s")
        return
    largest = max(needed.by_owner, key=lambda owner: needed.by_owner[owner])
    what = f"the run takes {text}, {needed.by_owner[largest]:.1f} GiB of it {largest}"
    too_large = needed.gib * (1 - MEMORY_BAND[1]) + CONTEXT_GIB > gpu.memory_gib
    # With a part that nobody has counted it may fit all the same.
    if too_large and not (found.notes or start.options.force or start.options.dry_run):
        raise TrainkitError(
            what, where="training.per_device_train_batch_size", fix=cures(found, or_force=True)
        )
    start.console.warn(f"{what}; it may run out of memory. {cures(found)}")


def cures(found: Estimate, *, or_force: bool = False) -> str:
    """What would make a run fit, in a sentence; the settings are overrides of the recipe."""
    ways = [
        f"{each.settings} ({each.peak_gib:.1f} GiB, {each.time - 1:+.0%} time)"
        for each in found.suggestions[:3]
    ]
    text = "; or ".join(ways) if ways else "take a larger GPU, or more of them"
    return f"{text}; or --force, to try all the same" if or_force else text


class MemoryRecord(TrainerCallback):
    """Writes the estimate, and what was measured; says so after the first step where they differ.

    Args:
        found: the estimate.
        run: where ``memory.json`` is; the first rank writes it.
        console: speaks.
        process: which of the run's processes this is; all of them measure.
        is_exact: every batch has the estimate's size; else it is the largest there may be.
        is_continued: the optimizer has its states before the first step of this start.
        read: the peak so far, in bytes.
    """

    def __init__(
        self,
        found: Estimate,
        run: RunDirectory,
        console: Console,
        process: ProcessRank,
        *,
        is_exact: bool,
        is_continued: bool = False,
        read: Callable[[], int] = torch.cuda.max_memory_allocated,
    ) -> None:
        self._found = found
        self._run = run
        self._console = console
        self._process = process
        # A budget is found in the first steps, which take less.
        self._is_exact = is_exact and not found.plan.recompute_first
        self._first = peak(found.plan, is_first=not is_continued).gib
        self._read = read
        self._measured: dict[str, Any] = {}
        self._seconds: list[float] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Keep the estimate."""
        self._write()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """After the first step of this start: compare it with what it should have taken."""
        if self._measured:
            return
        measured, said = largest_of(self._process, self._read()) / GIB, self._first
        self._measured["first_step_gib"] = round(measured, 3)
        self._measured["over_estimate"] = round(measured / said, 4)
        low, high = MEMORY_BAND
        if measured > said * (1 - low) or (self._is_exact and measured < said * (1 - high)):
            corrected = self._found.peak.gib * measured / said
            needed = corrected * RESERVED + CONTEXT_GIB
            self._measured["corrected_gib"] = round(corrected, 3)
            note = (
                f"memory: {measured:.1f} GiB measured in the first step, {said:.1f} GiB estimated "
                f"for it; corrected by that, the run's peak is {corrected:.1f} GiB and it needs "
                f"{needed:.1f} of {self._found.gpu.memory_gib:.1f} GiB"
            )
            gpu = self._found.gpu
            if needed <= gpu.memory_gib or measured <= said:  # the start has warned of what it said
                self._console.note(note)
            else:  # what fits a GPU that is smaller by as much as the estimate was too low
                less = replace(gpu, memory_gib=gpu.memory_gib * said / measured)
                corrected_too = estimate(self._found.plan, less, replan=self._found.replan)
                self._console.warn(f"{note}; it may run out of memory. {cures(corrected_too)}")
        self._write()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Keep the time of a step."""
        if logs and "step_seconds" in logs:
            self._seconds.append(logs["step_seconds"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Keep the peak of all steps and the median time of one."""
        self._measured["peak_gib"] = round(largest_of(self._process, self._read()) / GIB, 3)
        settled = sorted(self._seconds[2:] or self._seconds)
        if settled:
            self._measured["step_seconds"] = round(settled[len(settled) // 2], 5)
        self._write()

    def _write(self) -> None:
        if not self._process.is_main:
            return
        said = self._found.to_dict()
        self._run.write_json(self._run.memory, {"estimated": said, "measured": self._measured})
