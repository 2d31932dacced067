"""How large a difference is, and how large it would be by chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

# Two-sided 95% quantiles of Student's t for 1, 2, 3, ... degrees of freedom, and beyond 30.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_T95_LIMIT = 1.960
# Fewer blocks of steps than this say nothing about their spread; blocks that resemble each other
# count for fewer, and two is the least that can be told from none.
_FEWEST_BLOCKS = 4
_FEWEST_INDEPENDENT = 2


@dataclass(frozen=True)
class Interval:
    """A difference with its 95% interval.

    Attributes:
        difference: second minus first.
        low: of the interval; None where the spread cannot be known.
        high: likewise.
        count: what the interval is over: blocks of steps, seeds or questions.
    """

    difference: float
    low: float | None
    high: float | None
    count: int

    @property
    def is_clear(self) -> bool:
        """Whether zero lies outside the interval."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as programs read them."""
        return {**asdict(self), "is_clear": self.is_clear}


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Interval:
    """The mean difference of two equally long series, step by step.

    Neighbouring steps resemble one another, so they are not independent draws: the spread is that
    of the means of about sqrt(n) consecutive blocks. Where neighbouring blocks resemble each other
    still, they count for as many as independent ones would have to be.

    Raises:
        ValueError: the series have different lengths, or none.
    """
    if len(first) != len(second) or not first:
        raise ValueError("the series must be equally long, and not empty")
    gaps = [b - a for a, b in zip(first, second, strict=True)]
    mean = math.fsum(gaps) / len(gaps)
    size = max(math.isqrt(len(gaps)), 1)
    usable = len(gaps) - len(gaps) % size
    blocks = [math.fsum(gaps[at : at + size]) / size for at in range(0, usable, size)]
    if len(blocks) < _FEWEST_BLOCKS:
        return Interval(mean, None, None, len(blocks))
    count = _independent(blocks)
    if count < _FEWEST_INDEPENDENT:
        return Interval(mean, None, None, len(blocks))
    half = _t95(count - 1) * _deviation(blocks) / math.sqrt(count)
    return Interval(mean, mean - half, mean + half, len(blocks))


def _independent(blocks: Sequence[float]) -> float:
    """How many independent values have a mean as uncertain as that of these, by their neighbours.

    The correlation of neighbours, r, is found too small by about (1 + 3 r) / n in a short series.
    """
    mean = math.fsum(blocks) / len(blocks)
    gaps = [each - mean for each in blocks]
    spread = math.fsum(gap * gap for gap in gaps)
    if spread == 0:
        return len(blocks)
    found = math.fsum(a * b for a, b in pairwise(gaps)) / spread
    found += (1 + 3 * max(found, 0.0)) / len(blocks)
    correlation = min(max(found, 0.0), 0.99)
    return len(blocks) * (1 - correlation) / (1 + correlation)


def seeds_difference(first: Sequence[float], second: Sequence[float]) -> Interval:
    """The difference of two means over independent seeds: the wider of two t intervals.

    Welch's lets the sides differ in spread. Where one side has a few seeds and the other many, it
    is too narrow whenever the few happen to be alike; Student's, with one spread for both, is not.

    Raises:
        ValueError: a side is empty.
    """
    if not first or not second:
        raise ValueError("each side needs at least one run")
    mean = math.fsum(second) / len(second) - math.fsum(first) / len(first)
    count = min(len(first), len(second))
    if count < 2:
        return Interval(mean, None, None, count)
    sides = (first, second)
    shares = [_deviation(side) ** 2 / len(side) for side in sides]
    total = sum(shares)
    if total == 0:
        return Interval(mean, mean, mean, count)
    freedom = total**2 / sum(
        share**2 / (len(side) - 1) for share, side in zip(shares, sides, strict=True)
    )
    welch = _t95(freedom) * math.sqrt(total)
    whole = sum(len(side) - 1 for side in sides)
    pooled = sum(_deviation(side) ** 2 * (len(side) - 1) for side in sides) / whole
    student = _t95(whole) * math.sqrt(pooled * sum(1 / len(side) for side in sides))
    half = max(welch, student)
    return Interval(mean, mean - half, mean + half, count)


def widened_by_questions(interval: Interval, gaps: Sequence[float]) -> Interval:
    """An interval over seeds that knows of the questions' chance too: others would score otherwise.

    Two questions of opposite outcome are added (Agresti and Min): a handful that all agree leave no
    spread of their own.

    Args:
        interval: of scores over seeds.
        gaps: by question, the share of seeds that answer it, second minus first.
    """
    if interval.low is None or interval.high is None or not gaps:
        return interval
    known = [*gaps, 1.0, -1.0]
    chance = _t95(len(known) - 1) * _deviation(known) / math.sqrt(len(known))
    half = math.hypot((interval.high - interval.low) / 2, chance)
    return Interval(
        interval.difference, interval.difference - half, interval.difference + half, interval.count
    )


def sign_test(better: int, worse: int) -> float:
    """How likely so uneven a split of differing answers is when neither side is better.

    The exact two-sided binomial test on the questions that only one of the two got right (McNemar).

    Args:
        better: questions that only the second got right.
        worse: questions that only the first got right.

    Returns:
        The p value; 1 where nothing differs.
    """
    total = better + worse
    if total == 0:
        return 1.0
    tail = sum(math.comb(total, k) for k in range(min(better, worse) + 1))
    return min(1.0, float(2 * tail / 2**total)) if total < 1000 else _normal_tail(better, worse)


def _normal_tail(better: int, worse: int) -> float:
    z = max(abs(better - worse) - 1, 0) / math.sqrt(better + worse)
    return math.erfc(z / math.sqrt(2))


def _t95(freedom: float) -> float:
    """The quantile; degrees of freedom are rounded down, which widens the interval."""
    whole = max(int(freedom), 1)
    return _T95[whole - 1] if whole <= len(_T95) else _T95_LIMIT * (1 + 1.25 / whole)


def _deviation(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
