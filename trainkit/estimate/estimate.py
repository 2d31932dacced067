"""The answer to "will it fit, and how long will it take?", and what would make it fit."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trainkit.estimate.gpus import Gpu
from trainkit.estimate.job import Adapters
from trainkit.estimate.peak import (
    GIB,
    HELD_ON_THE_WAY,
    Peak,
    keep_to_budget,
    optimizer_bytes,
    peak,
    ranks_of,
)
from trainkit.estimate.plan import ALL_OPS, MIN_OFFLOAD_WIDTH, Plan, within_budget
from trainkit.estimate.speed import band, seconds
from trainkit.options import Fp8Options
from trainkit.options.optimizers import OPTIMIZERS

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


def suggest(plan: Plan, gpu: Gpu, replan: Replan | None = None) -> list[Suggestion]:
    """Changes that make a plan fit a GPU: as few as do, of those that train the same weights.

    With ``replan``, what is suggested is what the recipe then says; else what the plan's own
    changes come to.
    """
    found: dict[str, list[Suggestion]] = {kind: [] for kind in SHOWN}
    for number in (1, 2, 3, 4):
        for kind in [kind for kind in SHOWN if not found[kind]]:
            for each in _fitting(plan, gpu, number, kind):
                if len(found[kind]) == SHOWN[kind]:
                    break
                exact = _by_recipe(each, plan, gpu, replan)
                if exact and not any(_is_no_better(exact, known) for known in found[kind]):
                    found[kind].append(exact)
    return [each for kind in SHOWN for each in sorted(found[kind], key=lambda each: each.time)]


def _is_no_better(each: Suggestion, known: Suggestion) -> bool:
    return (
        each.time > 0.995 * known.time
        and each.peak_gib > 0.99 * known.peak_gib
        and each.host_gib >= known.host_gib
    )


def _by_recipe(each: Suggestion, plan: Plan, gpu: Gpu, replan: Replan | None) -> Suggestion | None:
    """A suggestion with what its recipe comes to; None where that is refused or does not fit.

    More than the changed setting may be another: a base in 4 bits offloads inputs, say, and
    adapters' matrices are too thin for an optimizer's projections.
    """
    if replan is None:
        return each
    changed = replan(each.settings, plan)
    if changed is None:
        return None
    found = _suggestion(each.settings, changed, plan, gpu, changes_result=each.changes_result)
    return found if _fits(changed, gpu) else None


def _suggestion(
    settings: str, changed: Plan, plan: Plan, gpu: Gpu, *, changes_result: bool
) -> Suggestion:
    return Suggestion(
        settings=settings,
        peak_gib=peak(changed).gib,
        time=_per_token(changed, gpu) / _per_token(plan, gpu),
        changes_result=changes_result,
        host_gib=host_gib(changed),
    )


def _fitting(plan: Plan, gpu: Gpu, number: int, kind: str) -> list[Suggestion]:
    """So many changes of a kind at a time that make it fit, the fastest first."""
    found: dict[str, Suggestion] = {}
    for chosen in itertools.combinations([list(axis) for axis in _axes(plan, gpu)], number):
        batch = [axis for axis in chosen if axis[0].startswith("batch")]
        sizes = batch[0] if batch else [""]
        for names in itertools.product(*([""] if axis in batch else axis for axis in chosen)):
            if kind != _kind(names):
                continue

            def attempt(size: str, names: tuple[str, ...] = names) -> tuple[str, Plan]:
                changed, words = plan, []
                for name in names:
                    text, changed = _change(changed, name or size)
                    words.append(text)
                return " ".join(words), keep_to_budget(changed)

            # The largest micro-batch that fits; each takes a recorded step.
            at = bisect.bisect_left(sizes, True, key=lambda size: _fits(attempt(size)[1], gpu))
            if at < len(sizes):
                settings, changed = attempt(sizes[at])
                found[settings] = _suggestion(
                    settings, changed, plan, gpu, changes_result=kind != "same"
                )
    return sorted(found.values(), key=lambda each: each.time)


def _fits(plan: Plan, gpu: Gpu) -> bool:
    return peak(plan).needed_gib <= gpu.memory_gib


def _kind(names: tuple[str, ...]) -> str:
    """What is trained with some changes: one of `SHOWN`."""
    if _ADAPTERS.intersection(names):
        return "adapters"
    return "rounded" if _ROUNDED.intersection(names) else "same"


LOSS_TILE, BLOCK_TILE = 4096, 8192
"""Tokens of a tile of the loss and of a feed-forward block: hardly slower, and small."""

_ROUNDED = frozenset({"nf4", "fp8", "optim", "bare", "backward"})
_ADAPTERS = frozenset({"lora", "qlora"})


def _with_optimizer(plan: Plan, name: str) -> Plan:
    row = OPTIMIZERS[name]
    part = ranks_of(plan)[0].shape if plan.tensor > 1 else plan.shape
    return replace(
        plan,
        optimizer=optimizer_bytes(row, part, full=True),
        one_pass=row.one_pass,
        paged=row.paged,
        slower=row.slower,
        flat=False,
        stepping=(row.step_bytes, row.step_largest_bytes),
    )


def _without_masters(plan: Plan, name: str, *, in_backward: bool) -> Plan:
    return _with_optimizer(replace(plan, keeps_masters=False, in_backward=in_backward), name)


def _with_adapters(plan: Plan, base: str) -> Plan:
    adapters = Adapters(offload=plan.shape.hidden >= MIN_OFFLOAD_WIDTH)
    return replace(plan, adapters=adapters, fp8=None, base=base)


def _recomputing(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, budget_gib=None, recompute_first=0, **changes)


def _offloading(plan: Plan) -> Plan:
    assert plan.adapters is not None
    return replace(plan, adapters=replace(plan.adapters, offload=True))


CHANGES: Mapping[str, tuple[str, Callable[[Plan], Plan]]] = {
    "selective": ("recompute=selective", lambda p: _recomputing(p, recompute=1, selective=True)),
    "every other": ("recompute.every=2", lambda p: _recomputing(p, recompute=2)),
    "all": ("recompute=full", lambda p: _recomputing(p, recompute=1)),
    "offloaded": (
        "recompute.every=1 recompute.offload=true",
        lambda p: _recomputing(p, recompute=1, offload=True),
    ),
    "offload": ("lora.offload_activations=true", _offloading),
    "nf4": ("lora.quantize=nf4", lambda p: replace(p, base="nf4", fp8=None)),
    "fp8": ("lora.quantize=fp8", lambda p: within_budget(replace(p, base="fp8"), Fp8Options())),
    "lora": ("lora.r=16", lambda p: _with_adapters(p, p.base)),
    "qlora": ("lora.r=16 lora.quantize=nf4", lambda p: _with_adapters(p, "nf4")),
    "kernels": ("kernels=true", lambda p: replace(p, ops=ALL_OPS)),
    "tiles": (
        f"model.loss_chunk_tokens={LOSS_TILE} model.mlp_chunk_tokens={BLOCK_TILE}",
        lambda p: replace(p, chunk_tokens=LOSS_TILE, tile_tokens=BLOCK_TILE),
    ),
    "zero1": ("parallel.shard=zero1", lambda p: replace(p, stage=1)),
    "zero2": ("parallel.shard=zero2", lambda p: replace(p, stage=2)),
    "zero3": ("parallel.shard=zero3", lambda p: replace(p, stage=3)),
    "zero3_offload": (
        "parallel.shard=zero3_offload",
        lambda p: replace(p, stage=3, offloads_optimizer=True, offloads_weights=True),
    ),
    "optim": ("training.optim=adamw_8bit", lambda p: _with_optimizer(p, "adamw_8bit")),
    "bare": (
        "training.optim=adamw_8bit model.master_weights=false",
        lambda p: _without_masters(p, "adamw_8bit", in_backward=False),
    ),
    "backward": (
        "training.optim=paged_adamw_8bit model.master_weights=false optim_in_backward=true "
        "training.max_grad_norm=0",
        lambda p: _without_masters(p, "paged_adamw_8bit", in_backward=True),
    ),
}
"""What can be changed: as it is written, and of a plan. With adapters a recomputed layer's inputs
are offloaded anyhow, where it pays."""


def _axes(plan: Plan, gpu: Gpu) -> Iterator[list[str]]:
    """Settings that exclude each other, axis by axis."""
    if not plan.ops:
        yield ["kernels"]
    if plan.batch_size > 1:
        yield [f"batch {size}" for size in _smaller(plan)]
    if not plan.recomputed_share:
        yield ["selective", "every other", "all", *(["offloaded"] if plan.adapters is None else [])]
    elif not plan.offloads_inputs and not plan.selective:
        yield ["offloaded" if plan.adapters is None else "offload"]
    if plan.tokens > BLOCK_TILE and not plan.is_tiled:
        yield ["tiles"]
    stages = [f"zero{n}" for n in (1, 2, 3) if n > plan.stage and plan.gpus > 1]
    if not plan.offloads_weights and not plan.fsdp and plan.base in ("bfloat16", "float32"):
        stages.append("zero3_offload")
    if stages:
        yield stages
    base = []
    if plan.adapters is None:
        base += ["lora", "qlora"]
    elif plan.base == "bfloat16":
        base += ["fp8", "nf4"] if gpu.fp8 else ["nf4"]
    if base:
        yield base
    if plan.adapters is None:
        rounds = plan.keeps_masters and plan.base == "bfloat16" and not plan.stage
        large = ["optim"] if (plan.optimizer or 0.0) > 4 else []
        yield [*large, "bare", "backward"] if rounds else large


def _smaller(plan: Plan) -> Iterator[int]:
    """Micro-batches of at most a half, a quarter, ... of the rows, that make up the same step."""
    rows, last, size = plan.batch_size * plan.accumulation, plan.batch_size, plan.batch_size // 2
    while size:
        divisor = next(each for each in range(size, 0, -1) if rows % each == 0)
        if divisor < last:
            yield divisor
        last, size = divisor, size // 2


def _change(plan: Plan, name: str) -> tuple[str, Plan]:
    """A change of a plan: as it is written, and what it makes of it."""
    if not name.startswith("batch"):
        text, change = CHANGES[name]
        return text, change(plan)
    size = int(name.split()[1])
    steps = plan.accumulation * plan.batch_size // size
    text = (
        f"training.per_device_train_batch_size={size} training.gradient_accumulation_steps={steps}"
    )
    return text, replace(plan, batch_size=size, accumulation=steps)


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
        step_seconds: of an optimizer step.
        time_band: by which share the time may be off.
        basis: what the time is anchored on.
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
