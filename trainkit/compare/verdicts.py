"""What can be said of two groups of runs, in numbers and in a sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from trainkit.compare.runs import ComparedRun, saw_the_same_batches, without_repeats
from trainkit.compare.statistics import (
    Interval,
    paired_difference,
    seeds_difference,
    sign_test,
    widened_by_questions,
)
from trainkit.run.metrics import read_verdicts

_ALPHA = 0.05
Runs = Sequence[ComparedRun]


@dataclass(frozen=True)
class Verdict:
    """One quantity of two groups.

    Attributes:
        quantity: ``training loss``, ``evaluation loss``, ``exact answers`` or a benchmark.
        interval: second minus first; a share for answers.
        p_value: of the sign test, for answers and benchmarks of one seed.
    """

    first: list[str]
    second: list[str]
    quantity: str
    interval: Interval
    p_value: float | None
    words: str

    def to_dict(self) -> dict[str, Any]:
        row = asdict(self)
        del row["interval"]
        return {**row, **self.interval.to_dict()}


def _verdict(
    sides: Sequence[Runs], quantity: str, interval: Interval, words: str, p: float | None = None
) -> Verdict:
    first, second = ([run.name for run in side] for side in sides)
    return Verdict(first, second, quantity, interval, p, words)


def verdicts(groups: Sequence[Runs]) -> Iterator[Verdict]:
    """Hold every group of seeds against the first."""
    own, *others = map(without_repeats, groups)
    for other in others:
        sides = (own, other)
        yield from _training_loss(sides)
        ends = [
            [run.last_eval_loss for run in side if run.last_eval_loss is not None] for side in sides
        ]
        if all(ends):
            interval = _of_losses(*ends)
            yield _verdict(sides, "evaluation loss", interval, _over_seeds(interval, sides))
        if set.intersection(*(set(run.answers) for side in sides for run in side)):
            found = [[run.answers for run in side] for side in sides]
            yield _over_questions("exact answers", found, sides)
        yield from _benchmarks(sides)


def _training_loss(sides: Sequence[Runs]) -> Iterator[Verdict]:
    """Over the second half of the steps that all runs have."""
    shared = sorted(set.intersection(*(set(run.losses) for side in sides for run in side)) - {0})
    half = len(shared) // 2
    settled = shared[half:]
    if not settled:
        return
    losses = [[run.losses_up_to(shared)[half:] for run in side] for side in sides]
    if min(map(len, sides)) > 1:
        interval = _of_losses(*([*map(fmean, side)] for side in losses))
        words = _over_seeds(interval, sides)
    else:
        (one, *_), (other, *_) = sides
        interval = paired_difference(losses[0][0], losses[1][0])
        words = _over_steps(interval, saw_the_same_batches(one, other))
    where = f"means over steps {settled[0]} to {settled[-1]}, the later half of those they share"
    yield _verdict(sides, "training loss", interval, f"{where}: {words}")


def _of_losses(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Losses over seeds; where seeds changed not even the last digit, chance was not there."""
    interval = seeds_difference(first, second)
    return replace(interval, half=interval.half or None)


def _over_seeds(interval: Interval, sides: Sequence[Runs]) -> str:
    if interval.half is None and interval.count > 1:
        return (
            "all seeds of a recipe gave exactly the same: they changed nothing, so how much of "
            "this is chance cannot be known"
        )
    if interval.half is None:
        return (
            "one seed on a side: how much of this is chance cannot be known; run each recipe with "
            "two or more values of training.seed and compare all of them"
        )
    counts = f"{len(sides[0])} and {len(sides[1])} seeds"
    if interval.is_clear:
        return f"more than the noise between {counts} explains"
    return f"within the noise between {counts}"


def _over_steps(interval: Interval, same_batches: bool) -> str:
    if interval.half is None:
        return "too few steps, or too much alike, to know the spread"
    said = "clear" if interval.is_clear else "not clear"
    paired = (
        "the same batches, paired by step"
        if same_batches
        else "other batches, so part of it is what the rows were"
    )
    return f"{said} for these two runs ({paired}); one seed each says nothing of other seeds"


def _benchmarks(sides: Sequence[Runs]) -> Iterator[Verdict]:
    """Scores of the same benchmarks.

    Other prompts are other questions, so they are not held against one another.
    """
    runs = [run for side in sides for run in side]
    for name, score in runs[0].scores.items():
        if any(name not in run.scores for run in runs):
            continue
        values = [[run.scores[name]["value"] for run in side] for side in sides]
        gap = Interval(fmean(values[1]) - fmean(values[0]), None, score["num_samples"])
        if len({(run.scores[name]["prompts"], str(run.scores[name]["shots"])) for run in runs}) > 1:
            yield _verdict(sides, name, gap, "asked with other prompts: not comparable")
            continue
        found = [[read_verdicts(run.scores[name]) for run in side] for side in sides]
        shared = set.intersection(*(set(own) for side in found for own in side))
        if shared or min(map(len, sides)) > 1:
            yield _over_questions(name, found, sides, values)
        else:
            yield _verdict(sides, name, gap, "no verdicts by question to pair")


def _over_questions(
    quantity: str,
    found: Sequence[Sequence[Mapping[str, bool]]],
    sides: Sequence[Runs],
    values: Sequence[Sequence[float]] | None = None,
) -> Verdict:
    """Of several seeds: the spread of seeds and questions. Of one: the questions that differ."""
    if min(map(len, sides)) > 1:
        shared = sorted(set.intersection(*(set(own) for side in found for own in side)))
        rights = [[{each: own[each] for each in shared} for own in side] for side in found]
        values = values or [[fmean(own.values()) for own in side] for side in rights]
        shares = [[fmean(own[each] for own in side) for each in shared] for side in rights]
        gaps = [after - before for before, after in zip(*shares, strict=True)]
        interval = widened_by_questions(seeds_difference(*values), gaps)
        words = f"{_over_seeds(interval, sides)}, with {len(gaps)} questions"
        return _verdict(sides, quantity, interval, words)
    before, after = found[0][0], found[1][0]
    both = [question for question in before if question in after]
    values = values or [[fmean(own[each] for each in both)] for own in (before, after)]
    better = sum(after[each] and not before[each] for each in both)
    worse = sum(before[each] and not after[each] for each in both)
    p_value = sign_test(better, worse)
    words = (
        f"of {len(both)} questions {better} only the second answers, {worse} only the first: "
        f"{'more' if p_value < _ALPHA else 'no more'} than chance explains (p = {p_value:.2g}); "
        "one seed on a side says nothing of other seeds"
    )
    interval = Interval(values[1][0] - values[0][0], None, len(both))
    return _verdict([side[:1] for side in sides], quantity, interval, words, p_value)
