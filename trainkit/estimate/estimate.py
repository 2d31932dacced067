"""The answer to "will it fit, and how long will it take?", and what would make it fit."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trainkit.estimate.gpus import Gpu
from trainkit.estimate.peak import GIB, HELD_ON_THE_WAY, Peak, peak
from trainkit.estimate.plan import Plan
from trainkit.estimate.speed import band, seconds

SHOWN: Mapping[str, int] = {"same": 2, "rounded": 2, "adapters": 2}
"""How many are given of each kind: they train the same weights, to the bit where nothing is
random; all of them with rounded states, or next to a rounded base; or adapters instead."""


@dataclass(frozen=True)
class Suggestion:
    """Settings that fit.

    Attributes:
        settings: overrides of the recipe, separated by blanks.
        time: seconds a token over what they are now; 1.2 is a fifth more. Without meaning where
            the plan itself could never run, and still the order of the suggestions.
        changes_result: the trained weights are others: adapters, a rounded base or rounded states.
        host_gib: of host memory that is needed besides, over all ranks.
    """

    settings: str
    peak_gib: float
    time: float
    changes_result: bool
    host_gib: float


Replan = Callable[[str, Plan], Plan | None]
"""A plan again, of its recipe with more settings on top, as `Suggestion.settings` writes them;
None where the recipe refuses them."""


def suggest(plan: Plan, gpu: Gpu, replan: Replan) -> list[Suggestion]:
    """Changes that make a plan fit a GPU: as few as do, of those that train the same weights.

    Each is tried as the recipe then says it, since more than the changed setting may be another: a
    base in 4 bits offloads inputs, say, and adapters' matrices are too thin for an optimizer's
    projections.
    """
    found: dict[str, list[Suggestion]] = {kind: [] for kind in SHOWN}
    for number in (1, 2, 3, 4):
        for kind in [kind for kind in SHOWN if not found[kind]]:
            for each in _fitting(plan, gpu, replan, number, kind):
                if len(found[kind]) == SHOWN[kind]:
                    break
                if all(
                    each.time <= 0.995 * known.time
                    or each.peak_gib <= 0.99 * known.peak_gib
                    or each.host_gib < known.host_gib
                    for known in found[kind]
                ):
                    found[kind].append(each)
    return [each for kind in SHOWN for each in sorted(found[kind], key=lambda each: each.time)]


def _fitting(plan: Plan, gpu: Gpu, replan: Replan, number: int, kind: str) -> list[Suggestion]:
    """So many changes of a kind at a time that make it fit, the fastest first."""
    found: list[Suggestion] = []
    for chosen in itertools.combinations(_axes(plan, gpu), number):
        sizes = next((axis for axis in chosen if _ROWS in axis[0]), [""])
        for names in itertools.product(*([""] if axis is sizes else axis for axis in chosen)):
            if kind != _kind(names):
                continue

            def attempt(size: str, names: tuple[str, ...] = names) -> tuple[str, Plan | None]:
                settings = " ".join(name or size for name in names)
                return settings, replan(settings, plan)

            # The largest micro-batch that fits; each takes a recorded step.
            at = bisect.bisect_left(sizes, True, key=lambda size: _fits(attempt(size)[1], gpu))
            settings, changed = attempt(sizes[at]) if at < len(sizes) else ("", None)
            if changed is not None:
                found.append(
                    Suggestion(
                        settings=settings,
                        peak_gib=peak(changed).gib,
                        time=_per_token(changed, gpu) / _per_token(plan, gpu),
                        changes_result=kind != "same",
                        host_gib=host_gib(changed),
                    )
                )
    return sorted(found, key=lambda each: each.time)


def _fits(plan: Plan | None, gpu: Gpu) -> bool:
    return plan is not None and peak(plan).needed_gib <= gpu.memory_gib


def _kind(names: tuple[str, ...]) -> str:
    """What is trained with some changes: one of `SHOWN`."""
    if {*_ADAPTERS}.intersection(names):
        return "adapters"
    return "rounded" if {*_BASES, _OPTIM, *_BARE}.intersection(names) else "same"


_BLOCK_TILE = 8192
"""Tokens of a tile of a feed-forward block: hardly slower, and small."""
_TILES = f"model.loss_chunk_tokens=4096 model.mlp_chunk_tokens={_BLOCK_TILE}"
_OFFLOADED = "recompute.every=1 recompute.offload=true"
_RECOMPUTED = ["recompute=selective", "recompute.every=2", "recompute=full"]
_ADAPTERS = ["lora.r=16", "lora.r=16 lora.quantize=nf4"]
_BASES = ["lora.quantize=fp8", "lora.quantize=nf4"]
_OPTIM = "training.optim=adamw_8bit"
_BARE = [
    "training.optim=adamw_8bit model.master_weights=false",
    "training.optim=paged_adamw_8bit model.master_weights=false optim_in_backward=true "
    "training.max_grad_norm=0",
]
_ROWS = "per_device_train_batch_size"


def _axes(plan: Plan, gpu: Gpu) -> Iterator[list[str]]:
    """Settings that exclude each other, axis by axis.

    With adapters a recomputed layer's inputs are offloaded anyhow, where it pays.
    """
    if not plan.ops:
        yield ["kernels=true"]
    if plan.batch_size > 1:
        rows = plan.batch_size * plan.accumulation
        yield [
            f"training.{_ROWS}={size} training.gradient_accumulation_steps={rows // size}"
            for size in _smaller(plan)
        ]
    if not plan.recomputed_share:
        yield [*_RECOMPUTED, *([_OFFLOADED] if plan.adapters is None else [])]
    elif not plan.offloads_inputs and not plan.selective:
        yield [_OFFLOADED if plan.adapters is None else "lora.offload_activations=true"]
    if plan.tokens > _BLOCK_TILE and not plan.is_tiled:
        yield [_TILES]
    stages = [f"zero{n}" for n in (1, 2, 3) if n > plan.stage and plan.gpus > 1]
    if not plan.offloads_weights and not plan.fsdp and plan.base in ("bfloat16", "float32"):
        stages.append("zero3_offload")
    if stages:
        yield [f"parallel.shard={stage}" for stage in stages]
    if plan.adapters is None:
        yield _ADAPTERS
        rounds = plan.keeps_masters and plan.base == "bfloat16" and not plan.stage
        large = [_OPTIM] if (plan.optimizer or 0.0) > 4 else []
        if large or rounds:
            yield [*large, *(_BARE if rounds else [])]
    elif plan.base == "bfloat16":
        yield _BASES if gpu.fp8 else _BASES[1:]


def _smaller(plan: Plan) -> Iterator[int]:
    """Micro-batches of at most a half, a quarter, ... of the rows, that make up the same step."""
    rows, last, size = plan.batch_size * plan.accumulation, plan.batch_size, plan.batch_size // 2
    while size:
        divisor = next(each for each in range(size, 0, -1) if rows % each == 0)
        if divisor < last:
            yield divisor
        last, size = divisor, size // 2


def host_gib(plan: Plan) -> float:
    """GiB of the host, over all ranks: masters, gradients and states, weights, layers' inputs.

    Pages of states are there where the GPU has no room for them.
    """
    found = plan.paged * plan.trained * (1 if plan.stage else plan.gpus)
    if plan.offloads_inputs:
        away = max(plan.recomputed_share * plan.shape.layers - HELD_ON_THE_WAY, 0)
        each = max(layer.output for layer in plan.recorded.kinds)
        found += away * each * plan.gpus * plan.tensor
    if plan.offloads_optimizer:
        found += plan.trained * (8 + (plan.optimizer or 0.0))
    if plan.offloads_weights:
        found += 2 * plan.shape.parameters
    return found / GIB


def _per_token(plan: Plan, gpu: Gpu) -> float:
    return seconds(plan, gpu) / (plan.tokens * plan.accumulation * plan.gpus)


MEMORY_BAND = (-0.02, 0.05)
"""How far the measured peak may lie from the estimate's, as shares of it."""


@dataclass(frozen=True)
class Estimate:
    """What a plan takes of a GPU.

    Attributes:
        total_tokens: of the whole run; None where unknown.
        suggestions: what would make it fit; empty where it does.
        replan: the plan with more settings in the recipe, see `suggest`.
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
        suggestions=[] if fits or replan is None else suggest(plan, gpu, replan),
        notes=notes or [],
        replan=replan,
    )


_WIDTH = 16


def lines(found: Estimate) -> Iterator[str]:
    plan, gpu = found.plan, found.gpu
    ranks = f"{plan.ranks} x {gpu.name}" if plan.ranks > 1 else gpu.name
    yield _line(
        "model",
        f"{plan.shape.name}: {_count(plan.shape.parameters)} parameters, "
        f"{_count(plan.trained)} trained",
    )
    yield _line(
        "step",
        f"{plan.batch_size} x {plan.length} tokens"
        + (f", {plan.accumulation} times" if plan.accumulation > 1 else ""),
    )
    yield _line("gpu", f"{ranks}, {gpu.memory_gib:.1f} GiB each")
    yield _line("peak memory", f"{found.peak.gib:.1f} GiB a GPU, at {found.peak.moment}")
    for owner, gib in found.peak.by_owner.items():
        if gib >= 0.005:
            yield f"  {owner:<{_WIDTH - 2}}{gib:8.2f} GiB"
    if host := host_gib(plan):
        yield _line("host memory", f"{host:.1f} GiB over all ranks, besides what Python takes")
    needed = f"{found.peak.needed_gib:.1f} GiB with the allocator's reserve and the driver"
    yield _line("fits", f"{'yes' if found.fits else 'NO'}: needs {needed}")
    share = f"within {found.time_band:.0%}; {found.basis}"
    yield _line(
        "speed",
        f"{found.tokens_per_second:,.0f} tokens/s, {found.step_seconds:.3g} s a step ({share})",
    )
    per_million = 1e6 / found.tokens_per_second / 3600
    hours = found.total_hours
    if hours is None:
        yield _line("time", f"{_hours(per_million)} per million tokens")
    else:
        assert found.total_tokens is not None
        yield _line(
            "time", f"{_hours(hours)} for {_count(found.total_tokens)} tokens ({found.counted})"
        )
    if not found.fits:
        if found.suggestions:
            yield "what would fit, those that train the same weights first:"
        else:
            yield "nothing in the recipe alone makes it fit: take a larger GPU, or more of them"
    for each in found.suggestions:
        cost = f"{each.time - 1:+.0%} time" if abs(each.time - 1) >= 0.005 else "the same time"
        result = "; the trained weights differ" if each.changes_result else ""
        away = f", {each.host_gib:.1f} GiB of host memory" if each.host_gib >= 0.05 else ""
        yield f"  {each.settings}\n    {each.peak_gib:.1f} GiB{away}, {cost}{result}"
    for note in found.notes:
        yield _line("note", note)


def _line(label: str, text: str) -> str:
    return f"{label:<{_WIDTH}}{text}"


def _count(number: float) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.0f}"


def _hours(hours: float) -> str:
    if hours < 1 / 60:
        return f"{hours * 3600:.0f} s"
    return f"{hours * 60:.0f} min" if hours < 2 else f"{hours:.1f} h"
