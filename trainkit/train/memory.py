"""The estimate of a run's memory and time: held against the GPU before the run, and measured in it.

``memory.json`` keeps both. On a CPU there is nothing to hold it against.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trainkit.errors import ModelError, TrainkitError
from trainkit.estimate.estimate import MEMORY_BAND, Estimate, estimate
from trainkit.estimate.gpus import Gpu
from trainkit.estimate.peak import CONTEXT_GIB, GIB, RESERVED, peak
from trainkit.estimate.recipe import plan_of, replanning, uncounted
from trainkit.kernels import ahead
from trainkit.parallel.agreement import largest_of
from trainkit.train.hooks import Hook, LoopState
from trainkit.train.run import Run


def expect(run: Run, gpu: Gpu) -> Estimate | None:
    """The estimate of a run on this process's GPU; None where nobody can say."""
    try:
        plan = plan_of(run.recipe, run.process.world_size)
    except ModelError as error:
        run.console.note(f"memory: {error.what}")
        return None
    lengths = getattr(run.data.train.samples, "lengths", None)
    if not run.recipe.data.packing and lengths is not None and len(lengths):
        plan = replace(plan, length=min(plan.length, int(lengths.max())))
    totals = run.data.summary["train"].get("totals") or {}
    if totals.get("images"):
        share = totals["image_tokens"] / totals["tokens"]  # of the mean row
        plan = replace(plan, image_tokens=math.ceil(plan.tokens * share))
    replan = replanning(run.loaded, run.process.world_size)
    own = torch.cuda.current_device() if torch.cuda.is_available() else None
    with ahead.noting(own) as noted:
        found = estimate(plan, gpu, notes=uncounted(run.recipe, plan.shape), replan=replan)
    _judge(found, run)
    ahead.compile_noted(noted, run.process.world_size)
    return found


def _judge(found: Estimate, run: Run) -> None:
    """Refuse what cannot fit, warn of what may not."""
    gpu, needed = found.gpu, found.peak
    text = f"about {needed.gib:.1f} GiB of {gpu.memory_gib:.1f} GiB ({gpu.name}) at the peak"
    if found.fits:
        run.console.note(f"memory: {text}; about {found.tokens_per_second:,.0f} tokens/s")
        return
    largest = max(needed.by_owner, key=lambda owner: needed.by_owner[owner])
    what = f"the run takes {text}, {needed.by_owner[largest]:.1f} GiB of it {largest}"
    too_large = needed.gib * (1 - MEMORY_BAND[1]) + CONTEXT_GIB > gpu.memory_gib
    # With a part that nobody has counted it may fit all the same.
    if too_large and not (found.notes or run.options.force or run.options.dry_run):
        raise TrainkitError(
            what, where="training.per_device_train_batch_size", fix=cures(found, or_force=True)
        )
    run.console.warn(f"{what}; it may run out of memory. {cures(found)}")


def cures(found: Estimate, *, or_force: bool = False) -> str:
    """What would make a run fit, in a sentence; the settings are overrides of the recipe."""
    ways = [
        f"{each.settings} ({each.peak_gib:.1f} GiB, {each.time - 1:+.0%} time)"
        for each in found.suggestions[:3]
    ]
    text = "; or ".join(ways) if ways else "take a larger GPU, or more of them"
    return f"{text}; or --force, to try all the same" if or_force else text


class MemoryRecord(Hook):
    """Writes the estimate and what was measured; says after the first step where they differ."""

    _found: Estimate
    _first: float

    def begin(self, loop: LoopState, checkpoint: Path | None) -> None:
        assert loop.run.expected is not None
        self._found = found = loop.run.expected
        # A budget is found in the first steps, which take less; other batches may be smaller.
        self._is_exact = loop.run.recipe.data.packing and not found.plan.recompute_first
        # A continued run's optimizer has its states before the first step.
        self._first = peak(found.plan, is_first=checkpoint is None).gib
        self._measured: dict[str, Any] = {}
        self._seconds: list[float] = []
        self._write(loop)

    def on_step_end(self, loop: LoopState) -> None:
        """After the first step of this start: compare it with what it should have taken."""
        if self._measured:
            return
        console, gpu = loop.run.console, self._found.gpu
        measured, said = self._peak(loop), self._first
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
                f"{needed:.1f} of {gpu.memory_gib:.1f} GiB"
            )
            if needed <= gpu.memory_gib or measured <= said:  # the start has warned of what it said
                console.note(note)
            else:  # what fits a GPU that is smaller by as much as the estimate was too low
                less = replace(gpu, memory_gib=gpu.memory_gib * said / measured)
                corrected_too = estimate(self._found.plan, less, replan=self._found.replan)
                console.warn(f"{note}; it may run out of memory. {cures(corrected_too)}")
        self._write(loop)

    def on_log(self, loop: LoopState, row: dict[str, Any]) -> None:
        if "step_seconds" in row:
            self._seconds.append(row["step_seconds"])

    def on_train_end(self, loop: LoopState) -> None:
        """Keep the peak of all steps and the median time of one."""
        self._measured["peak_gib"] = round(self._peak(loop), 3)
        settled = sorted(self._seconds[2:] or self._seconds)
        if settled:
            self._measured["step_seconds"] = round(settled[len(settled) // 2], 5)
        self._write(loop)

    def _peak(self, loop: LoopState) -> float:
        return largest_of(loop.run.process, torch.cuda.max_memory_allocated()) / GIB

    def _write(self, loop: LoopState) -> None:
        directory = loop.run.directory
        if loop.run.process.is_main:
            said = self._found.to_dict()
            directory.write_json(directory.memory, {"estimated": said, "measured": self._measured})
