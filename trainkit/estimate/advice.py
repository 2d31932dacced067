"""What would make a run fit, the cheapest first."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainkit.estimate.activations import input_per_token
from trainkit.estimate.fp8 import within_budget
from trainkit.estimate.gpus import Gpu
from trainkit.estimate.peak import GIB, HELD_ON_THE_WAY, keep_to_budget, peak, ranks_of
from trainkit.estimate.plan import ALL_OPS, MIN_OFFLOAD_WIDTH, Adapters, Plan
from trainkit.estimate.speed import seconds
from trainkit.estimate.state import optimizer_bytes
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
        peak_gib: with them.
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

    Args:
        plan: what does not fit.
        gpu: of every rank.
        replan: what is suggested is what the recipe then says; without a recipe, what the plan's
            own changes come to.
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
    return found if peak(changed).needed_gib <= gpu.memory_gib else None


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
        done: set[tuple[str, ...]] = set()
        for names in itertools.product(*chosen):
            besides = tuple(name for name in names if not name.startswith("batch"))
            if kind != _kind(names) or (besides != names and besides in done):
                continue  # a larger micro-batch fits with the same
            changed = plan
            for name in names:
                changed = _apply(changed, name)
            changed = keep_to_budget(changed)
            if peak(changed).needed_gib <= gpu.memory_gib:
                settings = " ".join(_written(name, plan) for name in names)
                found[settings] = _suggestion(
                    settings, changed, plan, gpu, changes_result=kind != "same"
                )
                done.add(besides)
    return sorted(found.values(), key=lambda each: each.time)


def _kind(names: tuple[str, ...]) -> str:
    """What is trained with some changes: one of `SHOWN`."""
    if _ADAPTERS.intersection(names):
        return "adapters"
    return "rounded" if _ROUNDED.intersection(names) else "same"


RECOMPUTED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "selective": ("recompute=selective", {"recompute": 1, "selective": True}),
    "every other": ("recompute.every=2", {"recompute": 2}),
    "all": ("recompute=full", {"recompute": 1}),
    "offloaded": (
        "recompute.every=1 recompute.offload=true",
        {"recompute": 1, "offload": True},
    ),
}
"""What of the activations can be given up: as it is written, and of a plan. With adapters the
inputs are offloaded anyhow, where it pays."""

OPTIM = "adamw_8bit"
_WITHOUT: Mapping[str, tuple[str, str]] = {
    "bare": (OPTIM, "model.master_weights=false"),
    "backward": (
        "paged_adamw_8bit",
        "model.master_weights=false optim_in_backward=true training.max_grad_norm=0",
    ),
}
"""Optimizers of bf16 weights without masters, and what else is written for them."""
LOSS_TILE, BLOCK_TILE = 4096, 8192
"""Tokens of a tile of the loss and of a feed-forward block: hardly slower, and small."""

_ROUNDED = frozenset({"nf4", "fp8", "optim", "bare", "backward"})
_ADAPTERS = frozenset({"lora", "qlora"})


def _axes(plan: Plan, gpu: Gpu) -> Iterator[list[str]]:
    """Settings that exclude each other, axis by axis."""
    if not plan.ops and plan.shape.traits.kernels:
        yield ["kernels"]
    if plan.batch_size > 1:
        yield [f"batch {size}" for size in _smaller(plan)]
    if not plan.recomputed_share:
        yield [name for name in RECOMPUTED if name != "offloaded" or plan.adapters is None]
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
        yield [*(["optim"] if (plan.optimizer or 0.0) > 4 else []), *(_WITHOUT if rounds else [])]


def _smaller(plan: Plan) -> Iterator[int]:
    """Micro-batches of at most a half, a quarter, ... of the rows, that make up the same step."""
    rows, last, size = plan.batch_size * plan.accumulation, plan.batch_size, plan.batch_size // 2
    while size:
        divisor = next(each for each in range(size, 0, -1) if rows % each == 0)
        if divisor < last:
            yield divisor
        last, size = divisor, size // 2


def _apply(plan: Plan, name: str) -> Plan:
    if name.startswith("batch"):
        size = int(name.split()[1])
        return replace(
            plan, batch_size=size, accumulation=plan.accumulation * plan.batch_size // size
        )
    if name == "zero3_offload":
        return replace(plan, stage=3, offloads_optimizer=True, offloads_weights=True)
    if name.startswith("zero"):
        return replace(plan, stage=int(name[4]))
    if name == "offload":
        assert plan.adapters is not None
        return replace(plan, adapters=replace(plan.adapters, offload=True))
    if name == "nf4":
        return replace(plan, base="nf4", fp8=None)
    if name == "fp8":
        return within_budget(replace(plan, base="fp8"), Fp8Options())
    if name in ("lora", "qlora"):
        adapters = Adapters(offload=plan.shape.hidden >= MIN_OFFLOAD_WIDTH)
        base = "nf4" if name == "qlora" else plan.base
        return replace(plan, adapters=adapters, fp8=None, base=base)
    if name == "kernels":
        return replace(plan, ops=ALL_OPS)
    if name == "tiles":
        return replace(plan, chunk_tokens=LOSS_TILE, tile_tokens=BLOCK_TILE)
    if name == "optim":
        return _with_optimizer(plan, OPTIM)
    if name in _WITHOUT:
        plan = replace(plan, keeps_masters=False, in_backward=name == "backward")
        return _with_optimizer(plan, _WITHOUT[name][0])
    return replace(plan, budget_gib=None, recompute_first=0, **RECOMPUTED[name][1])


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


def _written(name: str, plan: Plan) -> str:
    if name.startswith("batch"):
        size = int(name.split()[1])
        steps = plan.accumulation * plan.batch_size // size
        return (
            f"training.per_device_train_batch_size={size} "
            f"training.gradient_accumulation_steps={steps}"
        )
    if name.startswith("zero"):
        return f"parallel.shard={name}"
    if name in _WITHOUT:
        optim, more = _WITHOUT[name]
        return f"training.optim={optim} {more}"
    return {
        "offload": "lora.offload_activations=true",
        "nf4": "lora.quantize=nf4",
        "fp8": "lora.quantize=fp8",
        "lora": "lora.r=16",
        "qlora": "lora.r=16 lora.quantize=nf4",
        "kernels": "kernels=true",
        "tiles": f"model.loss_chunk_tokens={LOSS_TILE} model.mlp_chunk_tokens={BLOCK_TILE}",
        "optim": f"training.optim={OPTIM}",
    }.get(name) or RECOMPUTED[name][0]


def host_gib(plan: Plan) -> float:
    """GiB of the host, over all ranks: masters, gradients and states, weights, layers' inputs.

    Pages of states are there where the GPU has no room for them.
    """
    found = plan.paged * plan.trained * (1 if plan.stage else plan.gpus)
    if plan.offloads_inputs:
        away = max(plan.recomputed_share * plan.shape.layers - HELD_ON_THE_WAY, 0)
        found += away * input_per_token(plan) * plan.tokens * plan.gpus * plan.tensor
    if plan.offloads_optimizer:
        found += plan.trained * (8 + (plan.optimizer or 0.0))
    if plan.offloads_weights:
        found += 2 * plan.shape.parameters
    return found / GIB


def _per_token(plan: Plan, gpu: Gpu) -> float:
    return seconds(plan, gpu) / (plan.tokens * plan.accumulation * plan.gpus)
