"""What would make a run fit, the cheapest first."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainkit.estimate.fp8 import within_budget
from trainkit.estimate.gpus import Gpu
from trainkit.estimate.peak import GIB, keep_to_budget, peak
from trainkit.estimate.plan import ALL_OPS, MIN_OFFLOAD_WIDTH, Adapters, Plan
from trainkit.estimate.ranks import ranks_of
from trainkit.estimate.speed import seconds
from trainkit.estimate.state import optimizer_bytes
from trainkit.options import Fp8Options
from trainkit.options.optimizers import OPTIMIZERS

MOST = 5
"""Suggestions that are given."""


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


Allows = Callable[[str], bool]
"""Whether a recipe can have more settings, as `Suggestion.settings` writes them."""


def suggest(plan: Plan, gpu: Gpu, allows: Allows = bool) -> list[Suggestion]:
    """Changes that make a plan fit a GPU: as few as do, of those that train the same weights.

    Args:
        plan: what does not fit.
        gpu: of every rank.
        allows: what the recipe refuses is not suggested; without a recipe nothing is refused.
    """
    same: list[Suggestion] = []
    other: list[Suggestion] = []
    for number in (1, 2, 3, 4):
        for each in _fitting(plan, gpu, number, same_only=bool(other)):
            found, most = (other, MOST) if each.changes_result else (same, MOST - 2)
            if len(found) < most and allows(each.settings):
                found.append(each)
        if same:
            break
    return [*same, *other[: MOST - len(same)]]


def _fitting(plan: Plan, gpu: Gpu, number: int, *, same_only: bool) -> list[Suggestion]:
    """So many changes at a time that make it fit, the fastest first."""
    now = _per_token(plan, gpu)
    axes = [list(axis) for axis in _axes(plan, gpu)]
    if same_only:
        axes = [[name for name in axis if name not in _OTHER_RESULT] for axis in axes]
    found: dict[str, Suggestion] = {}
    for chosen in itertools.combinations(axes, number):
        done: set[tuple[str, ...]] = set()
        for names in itertools.product(*chosen):
            besides = tuple(name for name in names if not name.startswith("batch"))
            if besides != names and besides in done:
                continue  # a larger micro-batch fits with the same
            changed = plan
            for name in names:
                changed = _apply(changed, name)
            changed = keep_to_budget(changed)
            needed = peak(changed)
            if needed.needed_gib <= gpu.memory_gib:
                settings = " ".join(_written(name, plan) for name in names)
                time = _per_token(changed, gpu) / now
                result = any(name in _OTHER_RESULT for name in names)
                host = host_gib(changed)
                found[settings] = Suggestion(settings, needed.gib, time, result, host)
                done.add(besides)
    return sorted(found.values(), key=lambda each: each.time)


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
LOSS_TILE, BLOCK_TILE = 4096, 8192
"""Tokens of a tile of the loss and of a feed-forward block: hardly slower, and small."""

_OTHER_RESULT = frozenset({"nf4", "fp8", "lora", "qlora", "optim"})


def _axes(plan: Plan, gpu: Gpu) -> Iterator[list[str]]:
    """Settings that exclude each other, axis by axis."""
    if not plan.ops and plan.shape.traits.kernels:
        yield ["kernels"]
    if plan.batch_size > 1:
        sizes = []
        size = plan.batch_size // 2
        while size:
            sizes.append(f"batch {size}")
            size //= 2
        yield sizes
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
    if plan.adapters is None and (plan.optimizer or 0.0) > 4:
        yield ["optim"]


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
        part = ranks_of(plan)[0].shape if plan.tensor > 1 else plan.shape
        return replace(plan, optimizer=optimizer_bytes(OPTIMIZERS[OPTIM], part, full=True))
    return replace(plan, budget_gib=None, recompute_first=0, **RECOMPUTED[name][1])


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
    """GiB of the host, over all ranks: masters, gradients and states, and weights."""
    found = 0.0
    if plan.offloads_optimizer:
        found += plan.trained * (8 + (plan.optimizer or 0.0))
    if plan.offloads_weights:
        found += 2 * plan.shape.parameters
    return found / GIB


def _per_token(plan: Plan, gpu: Gpu) -> float:
    return seconds(plan, gpu) / (plan.tokens * plan.accumulation * plan.gpus)
