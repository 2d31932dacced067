"""What can be said of two groups of runs, in numbers and in a sentence."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Verdict:
    """One quantity of two groups.

    Attributes:
        first: the names of the first group's runs.
        second: those of the second's.
        quantity: ``training loss``, ``evaluation loss``, ``exact answers`` or a benchmark.
        interval: second minus first; a share for answers.
        p_value: of the sign test, for answers and benchmarks of one seed.
        words: what it means, in a sentence.
    """

    first: list[str]
    second: list[str]
    quantity: str
    interval: Interval
    p_value: float | None
    words: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as programs read them."""
        return {
            "first": self.first,
            "second": self.second,
            "quantity": self.quantity,
            **self.interval.to_dict(),
            "p_value": self.p_value,
            "words": self.words,
        }


def verdicts(groups: Sequence[Sequence[ComparedRun]]) -> Iterator[Verdict]:
    """Hold every group of seeds against the first."""
    own, *others = map(without_repeats, groups)
    for other in others:
        yield from _of_pair(own, other)


def _of_pair(first: Sequence[ComparedRun], second: Sequence[ComparedRun]) -> Iterator[Verdict]:
    names = ([run.name for run in first], [run.name for run in second])
    yield from _training_loss(first, second, names)
    ends = [
        [run.last_eval_loss for run in side if run.last_eval_loss is not None]
        for side in (first, second)
    ]
    if all(ends):
        interval = _of_losses(*ends)
        yield Verdict(
            *names, "evaluation loss", interval, None, _over_seeds(interval, first, second)
        )
    yield from _exact_answers(first, second, names)
    yield from _benchmarks(first, second, names)


def _training_loss(
    first: Sequence[ComparedRun], second: Sequence[ComparedRun], names: tuple[list[str], list[str]]
) -> Iterator[Verdict]:
    """Over the second half of the steps that all runs have."""
    shared = sorted(set.intersection(*(set(run.losses) for run in (*first, *second))))
    settled = shared[len(shared) // 2 :]
    if not settled:
        return
    if min(len(first), len(second)) > 1:
        ends = [
            [sum(run.losses[step] for step in settled) / len(settled) for run in side]
            for side in (first, second)
        ]
        interval = _of_losses(*ends)
        words = _over_seeds(interval, first, second)
    else:
        one, other = first[0], second[0]
        interval = paired_difference(
            [one.losses[step] for step in settled], [other.losses[step] for step in settled]
        )
        words = _over_steps(interval, saw_the_same_batches(one, other))
    where = f"means over steps {settled[0]} to {settled[-1]}, the later half of those they share"
    yield Verdict(*names, "training loss", interval, None, f"{where}: {words}")


def _of_losses(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Losses over seeds; where seeds changed not even the last digit, chance was not there."""
    interval = seeds_difference(first, second)
    if interval.low is None or interval.low != interval.high:
        return interval
    return Interval(interval.difference, None, None, interval.count)


def _over_seeds(
    interval: Interval, first: Sequence[ComparedRun], second: Sequence[ComparedRun]
) -> str:
    if interval.low is None and interval.count > 1:
        return (
            "all seeds of a recipe gave exactly the same: they changed nothing, so how much of "
            "this is chance cannot be known"
        )
    if interval.low is None:
        return (
            "one seed on a side: how much of this is chance cannot be known; run each recipe with "
            "two or more values of training.seed and compare all of them"
        )
    counts = f"{len(first)} and {len(second)} seeds"
    if interval.is_clear:
        return f"more than the noise between {counts} explains"
    return f"within the noise between {counts}"


def _over_steps(interval: Interval, same_batches: bool) -> str:
    if interval.low is None:
        return "too few steps, or too much alike, to know the spread"
    said = "clear" if interval.is_clear else "not clear"
    paired = (
        "the same batches, paired by step"
        if same_batches
        else "other batches, so part of it is what the rows were"
    )
    return f"{said} for these two runs ({paired}); one seed each says nothing of other seeds"


def _exact_answers(
    first: Sequence[ComparedRun], second: Sequence[ComparedRun], names: tuple[list[str], list[str]]
) -> Iterator[Verdict]:
    shared = set.intersection(*(set(run.answers) for run in (*first, *second)))
    if not shared:
        return
    sides = [
        [{each: run.answers[each] for each in shared} for run in side] for side in (first, second)
    ]
    yield _over_questions("exact answers", sides, names, first, second)


def _benchmarks(
    first: Sequence[ComparedRun], second: Sequence[ComparedRun], names: tuple[list[str], list[str]]
) -> Iterator[Verdict]:
    """Scores of the same benchmarks.

    Other prompts are other questions, so they are not held against one another.
    """
    runs = (*first, *second)
    for name, score in first[0].scores.items():
        if any(name not in run.scores for run in runs):
            continue
        values = [[run.scores[name]["value"] for run in side] for side in (first, second)]
        count = score["num_samples"]
        gap = Interval(_mean(values[1]) - _mean(values[0]), None, None, count)
        if len({(run.scores[name]["prompts"], str(run.scores[name]["shots"])) for run in runs}) > 1:
            yield Verdict(*names, name, gap, None, "asked with other prompts: not comparable")
            continue
        found = [[read_verdicts(run.scores[name]) for run in side] for side in (first, second)]
        shared = set.intersection(*(set(own) for side in found for own in side))
        if shared or min(len(first), len(second)) > 1:
            yield _over_questions(name, found, names, first, second, values)
        else:
            yield Verdict(*names, name, gap, None, "no verdicts by question to pair")


def _over_questions(
    quantity: str,
    found: Sequence[Sequence[Mapping[str, bool]]],
    names: tuple[list[str], list[str]],
    first: Sequence[ComparedRun],
    second: Sequence[ComparedRun],
    values: Sequence[Sequence[float]] | None = None,
) -> Verdict:
    """Of several seeds: the spread of seeds and questions. Of one: the questions that differ.

    Args:
        quantity: what was asked.
        found: whether each question was answered right, by side and run.
        names: of the runs.
        first: a side's runs.
        second: the other's.
        values: scores by side and run; the shares of right answers otherwise.
    """
    if values is None:
        values = [[_mean([*map(float, own.values())]) for own in side] for side in found]
    if min(len(first), len(second)) > 1:
        shared = set.intersection(*(set(own) for side in found for own in side))
        shares = [[_mean([own[each] for own in side]) for each in sorted(shared)] for side in found]
        gaps = [after - before for before, after in zip(*shares, strict=True)]
        interval = widened_by_questions(seeds_difference(*values), gaps)
        words = _over_seeds(interval, first, second)
        return Verdict(*names, quantity, interval, None, f"{words}, with {len(gaps)} questions")
    before, after = found[0][0], found[1][0]
    both = [question for question in before if question in after]
    better = sum(after[each] and not before[each] for each in both)
    worse = sum(before[each] and not after[each] for each in both)
    p_value = sign_test(better, worse)
    words = (
        f"of {len(both)} questions {better} only the second answers, {worse} only the first: "
        f"{'more' if p_value < _ALPHA else 'no more'} than chance explains (p = {p_value:.2g}); "
        "one seed on a side says nothing of other seeds"
    )
    interval = Interval(values[1][0] - values[0][0], None, None, len(both))
    return Verdict([first[0].name], [second[0].name], quantity, interval, p_value, words)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
