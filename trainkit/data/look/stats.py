"""Figures about prepared data: lengths, trained share, duplicates, cuts, packing."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainkit.data.build.datasets import PreparedData
from trainkit.data.build.packing import efficiency

MAX_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True)
class Cut:
    """What a ``max_length`` would do.

    Attributes:
        max_length: in tokens.
        samples: longer samples.
        tokens: tokens behind the limit, in all samples.
        trained_tokens: trained ones among them.
        packing_efficiency: the share of packed rows that is not padding, over samples that fit.
    """

    max_length: int
    samples: int
    tokens: int
    trained_tokens: int
    packing_efficiency: float


@dataclass(frozen=True)
class DataStats:
    """Figures about prepared data.

    Attributes:
        samples, tokens, trained_tokens: totals.
        lengths: ``p50``, ``p95``, ``p99``, ``max``, ``mean``, in tokens.
        trained_share: trained tokens over tokens.
        rows: ``kept``, ``dropped``, ``cut`` and ``repaired`` ones, and those of each reason.
        duplicates: samples whose ids another sample has too, not counting the first of each.
        cuts: for every ``max_length`` to count.
        suggested_max_length: the smallest multiple of 64 that takes 99% of the samples whole.
        histogram: upper edge (tokens) and number of samples of each bar.
    """

    samples: int
    tokens: int
    trained_tokens: int
    lengths: dict[str, float]
    trained_share: float
    rows: dict[str, int]
    duplicates: int
    cuts: tuple[Cut, ...]
    suggested_max_length: int
    histogram: tuple[tuple[int, int], ...]


def measure(data: PreparedData, max_lengths: Sequence[int] = MAX_LENGTHS) -> DataStats:
    """Measure data that was prepared without a limit on its length.

    Args:
        data: at least one sample.
        max_lengths: limits to try.
    """
    lengths = data.lengths
    p50, p95, p99 = (float(value) for value in np.percentile(lengths, (50, 95, 99)))
    longest = int(lengths.max())
    tried = [limit for limit in max_lengths if limit < 2 * longest] or [max_lengths[0]]
    tokens = int(lengths.sum())
    return DataStats(
        samples=len(data),
        tokens=tokens,
        trained_tokens=int(data.num_trained.sum()),
        lengths={
            "p50": p50,
            "p95": p95,
            "p99": p99,
            "max": float(longest),
            "mean": round(float(lengths.mean()), 1),
        },
        trained_share=int(data.num_trained.sum()) / tokens,
        rows=_rows(data),
        duplicates=_count_duplicates(data),
        cuts=tuple(_cut(data, limit) for limit in tried),
        suggested_max_length=-(-int(np.ceil(p99)) // 64) * 64,
        histogram=_histogram(lengths),
    )


def as_rows(stats: DataStats) -> list[dict[str, Any]]:
    """The figures as flat rows {metric, value, unit}, and the cuts with their ``max_length``."""
    rows: list[dict[str, Any]] = [
        {"metric": "samples", "value": stats.samples, "unit": "samples"},
        {"metric": "tokens", "value": stats.tokens, "unit": "tokens"},
        {"metric": "trained_tokens", "value": stats.trained_tokens, "unit": "tokens"},
        {"metric": "trained_share", "value": round(stats.trained_share, 4), "unit": "share"},
        {"metric": "duplicates", "value": stats.duplicates, "unit": "samples"},
        {"metric": "suggested_max_length", "value": stats.suggested_max_length, "unit": "tokens"},
    ]
    rows += [
        {"metric": f"length_{name}", "value": value, "unit": "tokens"}
        for name, value in stats.lengths.items()
    ]
    rows += [
        {"metric": f"rows_{name}", "value": count, "unit": "rows"}
        for name, count in stats.rows.items()
    ]
    for cut in stats.cuts:
        at = {"max_length": cut.max_length}
        rows += [
            {"metric": "cut_samples", "value": cut.samples, "unit": "samples", **at},
            {"metric": "cut_tokens", "value": cut.tokens, "unit": "tokens", **at},
            {"metric": "cut_trained_tokens", "value": cut.trained_tokens, "unit": "tokens", **at},
            {
                "metric": "packing_efficiency",
                "value": round(cut.packing_efficiency, 4),
                "unit": "share",
                **at,
            },
        ]
    return rows


def _rows(data: PreparedData) -> dict[str, int]:
    found = Counter(
        {key: data.summary["totals"][key] for key in ("kept", "dropped", "cut", "repaired")}
    )
    for file in data.summary["files"]:
        found.update(file["reasons"])
    return dict(found)


def _cut(data: PreparedData, limit: int) -> Cut:
    long = np.flatnonzero(data.lengths > limit)
    trained = sum(int(np.count_nonzero(data[int(i)]["loss_mask"][limit:])) for i in long)
    return Cut(
        max_length=limit,
        samples=len(long),
        tokens=int((data.lengths[long] - limit).sum()),
        trained_tokens=trained,
        packing_efficiency=efficiency(data.lengths[data.lengths <= limit], limit),
    )


def _count_duplicates(data: PreparedData) -> int:
    seen: set[bytes] = set()
    for index in range(len(data)):
        ids = data[index]["input_ids"]
        seen.add(hashlib.blake2b(ids.tobytes(), digest_size=12).digest())
    return len(data) - len(seen)


def _histogram(lengths: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Bars that each reach to 2 ** (1 / 2) times the length of the one before."""
    edges = sorted({round(8 * 2 ** (step / 2)) for step in range(60)})
    top = next((i for i, edge in enumerate(edges) if edge >= lengths.max()), len(edges) - 1)
    places = np.searchsorted(edges[:top], lengths, side="left")
    counts = np.bincount(places, minlength=top + 1)
    first = int(np.flatnonzero(counts)[0])
    return tuple((edges[i], int(counts[i])) for i in range(first, top + 1))


def draw_histogram(stats: DataStats, max_length: int | None, path: str) -> None:
    """Draw the lengths as a PNG picture.

    Args:
        stats: the figures.
        max_length: the recipe's limit, marked by a line, or None.
        path: of the picture.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), dpi=140, layout="constrained")
    axes = figure.add_subplot()
    places = range(len(stats.histogram))
    axes.bar(places, [count for _, count in stats.histogram], color="#4477aa", width=0.9)
    axes.set_xticks(list(places), [f"{edge:,}" for edge, _ in stats.histogram], rotation=45)
    axes.set_xlabel("tokens in a sample, up to")
    axes.set_ylabel("samples")
    axes.spines[["top", "right"]].set_visible(False)
    edges = np.array([edge for edge, _ in stats.histogram], dtype=float)
    lines = [("p50", stats.lengths["p50"], "#228833"), ("p99", stats.lengths["p99"], "#aa3377")]
    if max_length is not None:
        lines.append(("max_length", float(max_length), "#ee6677"))
    for name, value, color in lines:
        # Bars are evenly spaced in the logarithm of the length.
        place = np.interp(np.log(value), np.log(edges), np.arange(len(edges))) + 0.45
        style = "--" if name == "max_length" else ":"
        axes.axvline(place, color=color, linestyle=style, label=f"{name} {value:,.0f}")
    axes.legend(frameon=False)
    axes.set_title(
        f"{stats.samples:,} samples, {stats.tokens:,} tokens, {stats.trained_share:.0%} trained"
    )
    figure.savefig(path)
