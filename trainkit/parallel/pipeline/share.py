"""Which layers a rank has. No torch.

A pipeline of P ranks has P times V stages, V on each rank: contiguous layers, in order. Stage 0
begins with the embeddings, the last one ends with the final norm, the head and the loss.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainkit.errors import ModelError, RecipeError
from trainkit.options.parallel import ParallelOptions


@dataclass(frozen=True)
class Schedule:
    """One row.

    Attributes:
        stages: on each rank, unless a recipe says otherwise.
        is_v_shaped: a rank's second stage mirrors its first: rank 0 has the first and the last.
        multiple: micro-batches come in multiples of it times the ranks.
        splits_backward: gradients of weights are made after, and apart from, those of the input.
    """

    engine: str
    stages: int = 2
    is_v_shaped: bool = False
    multiple: int = 0
    splits_backward: bool = False


SCHEDULES: Mapping[str, Schedule] = {
    "1f1b": Schedule("1F1B", stages=1),
    "interleaved": Schedule("Interleaved1F1B", multiple=1),
    "zbv": Schedule("ZBVZeroBubble", is_v_shaped=True, splits_backward=True),
}
"""THE TABLE of schedules."""


@dataclass(frozen=True)
class Share:
    """What of a pipeline one of its ranks has."""

    stages: Mapping[int, range]
    num_stages: int
    ranks: tuple[int, ...]

    @property
    def layers(self) -> frozenset[int]:
        return frozenset(layer for layers in self.stages.values() for layer in layers)

    @property
    def has_first(self) -> bool:
        return 0 in self.stages

    @property
    def has_last(self) -> bool:
        return self.num_stages - 1 in self.stages

    @property
    def last_rank(self) -> int:
        """Which rank of the pipeline has the head."""
        return self.ranks[-1]

    @classmethod
    def of(cls, options: ParallelOptions, rank: int, num_layers: int, head: float = 0.0) -> "Share":
        size, per_rank = (
            options.pipeline,
            options.stages_per_rank or SCHEDULES[options.schedule].stages,
        )
        num_stages = size * per_rank
        if SCHEDULES[options.schedule].is_v_shaped:
            ranks = (*range(size), *reversed(range(size)))
        else:
            ranks = tuple(range(size)) * per_rank
        cuts = cut(num_layers, ranks, head)
        mine = {stage: cuts[stage] for stage in range(num_stages) if ranks[stage] == rank}
        return cls(mine, num_stages, ranks)


def cut(num_layers: int, ranks: Sequence[int], head: float = 0.0) -> list[range]:
    """The layers of each stage: as equal work as whole layers allow for every rank."""
    num_stages = len(ranks)
    if num_layers < num_stages:
        raise ModelError(
            f"the model's {num_layers} layers cannot fill {num_stages} stages",
            where="parallel.pipeline",
            fix=f"set parallel.pipeline times parallel.stages_per_rank to {num_layers} at most",
        )
    sizes, last = [1] * num_stages, num_stages - 1

    def work(stage: int) -> float:
        return sizes[stage] + head * (stage == last)

    def order(stage: int) -> tuple[float, float, bool, int]:
        of_rank = sum(work(each) for each in range(num_stages) if ranks[each] == ranks[stage])
        return of_rank, work(stage), stage in (0, last), -stage

    for _ in range(num_layers - num_stages):
        sizes[min(range(num_stages), key=order)] += 1
    stops = list(itertools.accumulate(sizes))
    return [range(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]


def refuse_micro_batches(options: ParallelOptions, num_micro_batches: int) -> None:
    """Refuse a step of too few micro-batches, or of a number that the schedule cannot deal with."""
    row, size = SCHEDULES[options.schedule], options.pipeline
    step = max(row.multiple * size, 1)
    if num_micro_batches < size or num_micro_batches % step:
        larger = max(-(-num_micro_batches // step) * step, size)
        kind = f"a multiple of {step}" if step > 1 else f"{size} or more"
        raise RecipeError(
            f"a step has {num_micro_batches} micro-batches, and schedule {options.schedule} over "
            f"{size} ranks takes {kind}",
            where="training.gradient_accumulation_steps",
            fix=f"set it to {larger}, or raise global_batch_size",
        )
