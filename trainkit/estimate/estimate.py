"""The answer to "will it fit, and how long will it take?"."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from trainkit.estimate.advice import Replan, Suggestion, host_gib, suggest
from trainkit.estimate.gpus import Gpu
from trainkit.estimate.peak import Peak, peak
from trainkit.estimate.plan import Plan
from trainkit.estimate.speed import band, seconds

MEMORY_BAND = (-0.02, 0.05)
"""How far the measured peak may lie from the estimate's, as shares of it."""


@dataclass(frozen=True)
class Estimate:
    """What a plan takes of a GPU.

    Attributes:
        plan: what was estimated.
        gpu: on what.
        peak: the worst moment.
        step_seconds: of an optimizer step.
        time_band: by which share the time may be off.
        basis: what the time is anchored on.
        total_tokens: of the whole run; None where unknown.
        counted: how they were counted.
        suggestions: what would make it fit; empty where it does.
        notes: what is left out.
        replan: the plan with more settings in the recipe, see `advice`.
    """

    plan: Plan
    gpu: Gpu
    peak: Peak
    step_seconds: float
    time_band: float
    basis: str
    total_tokens: float | None
    counted: str
    suggestions: list[Suggestion]
    notes: list[str]
    replan: Replan | None = field(default=None, repr=False)

    @property
    def fits(self) -> bool:
        """Whether the GPU has it, with the allocator's reserve and the driver's share."""
        return self.peak.needed_gib <= self.gpu.memory_gib

    @property
    def tokens_per_second(self) -> float:
        """Over all GPUs."""
        plan = self.plan
        return plan.tokens * plan.accumulation * plan.gpus / self.step_seconds

    @property
    def total_hours(self) -> float | None:
        """Of the whole run."""
        if self.total_tokens is None:
            return None
        return self.total_tokens / self.tokens_per_second / 3600

    def to_dict(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        speed, hours = self.tokens_per_second, self.total_hours
        return {
            "model": self.plan.shape.name,
            "parameters": self.plan.shape.parameters,
            "trained_parameters": self.plan.trained,
            "gpu": self.gpu.name,
            "gpus": self.plan.ranks,
            "gpu_memory_gib": self.gpu.memory_gib,
            "fits": self.fits,
            "peak_gib": round(self.peak.gib, 3),
            "needed_gib": round(self.peak.needed_gib, 3),
            "host_gib": round(host_gib(self.plan), 1),
            "peak_at": self.peak.moment,
            "by_owner": {owner: round(gib, 3) for owner, gib in self.peak.by_owner.items()},
            "step_seconds": round(self.step_seconds, 4),
            "tokens_per_second": round(speed, 1),
            "tokens_per_second_band": [
                round(speed * (1 - self.time_band), 1),
                round(speed * (1 + self.time_band), 1),
            ],
            "time_band": self.time_band,
            "anchored_on": self.basis,
            "hours_per_million_tokens": round(1e6 / speed / 3600, 5),
            "total_tokens": self.total_tokens,
            "total_hours": None if hours is None else round(hours, 3),
            "tokens_counted_by": self.counted,
            "suggestions": [
                {
                    "settings": each.settings,
                    "peak_gib": round(each.peak_gib, 3),
                    "time": round(each.time, 3),
                    "changes_result": each.changes_result,
                    "host_gib": round(each.host_gib, 1),
                }
                for each in self.suggestions
            ],
            "notes": self.notes,
        }


def estimate(
    plan: Plan,
    gpu: Gpu,
    *,
    tokens: tuple[float, str] | None = None,
    notes: list[str] | None = None,
    replan: Replan | None = None,
) -> Estimate:
    """Estimate a plan.

    Args:
        plan: the step.
        gpu: of every rank.
        tokens: of the whole run, and how they were counted.
        notes: what the plan leaves out.
        replan: the plan with more settings in the recipe, see `advice`.
    """
    plan = replace(plan, gpu_gib=gpu.memory_gib)
    found = peak(plan)
    time_band, basis = band(plan, gpu)
    fits = found.needed_gib <= gpu.memory_gib
    return Estimate(
        plan=plan,
        gpu=gpu,
        peak=found,
        step_seconds=seconds(plan, gpu),
        time_band=time_band,
        basis=basis,
        total_tokens=None if tokens is None else tokens[0],
        counted="nothing to count" if tokens is None else tokens[1],
        suggestions=[] if fits else suggest(plan, gpu, replan),
        notes=notes or [],
        replan=replan,
    )
