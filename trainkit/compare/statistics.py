"""How large a difference is, and how large it would be by chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, stdev
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
        half: of the interval's width; None where the spread cannot be known.
        count: what the interval is over: blocks of steps, seeds or questions.
    """

    difference: float
    half: float | None
    count: int

    @property
    def low(self) -> float | None:
        return None if self.half is None else self.difference - self.half

    @property
    def high(self) -> float | None:
        return None if self.half is None else self.difference + self.half

    @property
    def is_clear(self) -> bool:
        """Whether zero lies outside the interval."""
        return self.half is not None and abs(self.difference) > self.half

    def to_dict(self) -> dict[str, Any]:
        names = ("difference", "low", "high", "count", "is_clear")
        return {name: getattr(self, name) for name in names}


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Interval:
    """The mean difference of two equally long series, step by step.

    Neighbouring steps resemble one another, so they are not independent draws: the spread is that
    of the means of about sqrt(n) consecutive blocks. Where neighbouring blocks resemble each other
    still, they count for as many as independent ones would have to be.
    """
    gaps = [b - a for a, b in zip(first, second, strict=True)]
    size = math.isqrt(len(gaps))
    usable = len(gaps) - len(gaps) % size
    blocks = [fmean(gaps[at : at + size]) for at in range(0, usable, size)]
    count = _independent(blocks) if len(blocks) >= _FEWEST_BLOCKS else 0
    half = None
    if count >= _FEWEST_INDEPENDENT:
        half = _t95(count - 1) * stdev(blocks) / math.sqrt(count)
    return Interval(fmean(gaps), half, len(blocks))


def _independent(blocks: Sequence[float]) -> float:
    """How many independent values have a mean as uncertain as that of these, by their neighbours.

    The correlation of neighbours, r, is found too small by about (1 + 3 r) / n in a short series.
    """
    mean = fmean(blocks)
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
    """
    sides = (first, second)
    mean, count = fmean(second) - fmean(first), min(map(len, sides))
    if count < 2:
        return Interval(mean, None, count)
    squares = [stdev(side) ** 2 for side in sides]
    if not any(squares):
        return Interval(mean, 0.0, count)
    shares = [square / len(side) for square, side in zip(squares, sides, strict=True)]
    degrees = [len(side) - 1 for side in sides]
    freedom = sum(shares) ** 2 / sum(s**2 / n for s, n in zip(shares, degrees, strict=True))
    welch = _t95(freedom) * math.sqrt(sum(shares))
    pooled = sum(s * n for s, n in zip(squares, degrees, strict=True)) / sum(degrees)
    student = _t95(sum(degrees)) * math.sqrt(pooled * sum(1 / len(side) for side in sides))
    return Interval(mean, max(welch, student), count)


def widened_by_questions(interval: Interval, gaps: Sequence[float]) -> Interval:
    """An interval over seeds that knows of the questions' chance too: others would score otherwise.

    Two questions of opposite outcome are added (Agresti and Min): a handful that all agree leave no
    spread of their own.
    """
    if interval.half is None or not gaps:
        return interval
    known = [*gaps, 1.0, -1.0]
    chance = _t95(len(known) - 1) * stdev(known) / math.sqrt(len(known))
    return replace(interval, half=math.hypot(interval.half, chance))


def sign_test(better: int, worse: int) -> float:
    """How likely so uneven a split of differing answers is when neither side is better.

    The exact two-sided binomial test on the questions that only one of the two got right (McNemar).

    Returns:
        The p value; 1 where nothing differs.
    """
    total = better + worse
    logs = (
        math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1)
        for k in range(min(better, worse) + 1)
    )
    return min(1.0, 2 * math.fsum(math.exp(log - total * math.log(2)) for log in logs))


def _t95(freedom: float) -> float:
    """The quantile; degrees of freedom are rounded down, which widens the interval."""
    whole = max(int(freedom), 1)
    return _T95[whole - 1] if whole <= len(_T95) else _T95_LIMIT * (1 + 1.25 / whole)
