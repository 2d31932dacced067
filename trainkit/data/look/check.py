"""Figures about prepared data, and the verdict: would it train what it should?"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from trainkit.data.build.datasets import PreparedData, efficiency
from trainkit.data.build.summary import source_notes
from trainkit.errors import DataError

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
    tokens, totals = int(lengths.sum()), data.summary["totals"]
    rows = Counter({key: totals[key] for key in ("kept", "dropped", "cut", "repaired")})
    for file in data.summary["files"]:
        rows.update(file["reasons"])
    ids = (data[index]["input_ids"].tobytes() for index in range(len(data)))
    different = {hashlib.blake2b(each, digest_size=12).digest() for each in ids}
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
        rows=dict(rows),
        duplicates=len(data) - len(different),
        cuts=tuple(_cut_at(data, limit) for limit in tried),
        suggested_max_length=-(-int(np.ceil(p99)) // 64) * 64,
        histogram=_histogram(lengths),
    )


def as_rows(stats: DataStats) -> list[dict[str, Any]]:
    """The figures as flat rows {metric, value, unit}, and the cuts with their ``max_length``."""

    def row(metric: str, value: float, unit: str, **at: int) -> dict[str, Any]:
        return {"metric": metric, "value": value, "unit": unit, **at}

    rows = [
        row("samples", stats.samples, "samples"),
        row("tokens", stats.tokens, "tokens"),
        row("trained_tokens", stats.trained_tokens, "tokens"),
        row("trained_share", round(stats.trained_share, 4), "share"),
        row("duplicates", stats.duplicates, "samples"),
        row("suggested_max_length", stats.suggested_max_length, "tokens"),
    ]
    rows += [row(f"length_{name}", value, "tokens") for name, value in stats.lengths.items()]
    rows += [row(f"rows_{name}", count, "rows") for name, count in stats.rows.items()]
    for cut in stats.cuts:
        at = {"max_length": cut.max_length}
        rows += [
            row("cut_samples", cut.samples, "samples", **at),
            row("cut_tokens", cut.tokens, "tokens", **at),
            row("cut_trained_tokens", cut.trained_tokens, "tokens", **at),
            row("packing_efficiency", round(cut.packing_efficiency, 4), "share", **at),
        ]
    return rows


def _cut_at(data: PreparedData, limit: int) -> Cut:
    long = np.flatnonzero(data.lengths > limit)
    trained = sum(int(np.count_nonzero(data[int(i)]["loss_mask"][limit:])) for i in long)
    return Cut(
        max_length=limit,
        samples=len(long),
        tokens=int((data.lengths[long] - limit).sum()),
        trained_tokens=trained,
        packing_efficiency=efficiency(data.lengths[data.lengths <= limit], limit),
    )


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


Status = Literal["ok", "warning", "error"]

MAX_DROPPED_SHARE = 0.01
MAX_LOST_SHARE = 0.05
MAX_DUPLICATE_SHARE = 0.05
MIN_TRAINED_SHARE = 0.02
MAX_ENDLESS_SHARE = 0.01


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        check: what.
        status: ``error`` means the data would train wrongly.
        detail: a sentence with the figures.
        fix: what to do, where there is something.
    """

    check: str
    status: Status
    detail: str
    fix: str = ""


def verdict(summary: Mapping[str, Any]) -> list[Finding]:
    """What ``data check``, a run and its dry run all say of the same data.

    Args:
        summary: of prepared data, or of the beginning of a stream, which has no totals.
    """
    findings = [_stop_tokens(summary)]
    if "totals" in summary:
        findings = [_rows(summary), _cut(summary), _length(summary), _mask(summary), *findings]
    findings += [Finding("files", "warning", twice) for twice in summary["listed_twice"]]
    counts = summary["counts"]
    thinking = [warning for warning in summary["warnings"] if "thinking" in warning]
    findings += [Finding("thinking", "warning", warning) for warning in thinking]
    for name, what in (
        ("escaped_special_tokens", "control tokens inside message text were broken up"),
        (
            "straddling_tokens",
            "tokens reach over an answer's border and are trained in full; a prompt that ends in a "
            "blank does this: the tokenizer joins it to the answer's first word",
        ),
        ("double_bos", "texts begin with the bos token that the tokenizer adds; it is there once"),
        ("texts_in_pieces", "texts are longer than max_length and come in pieces"),
    ):
        if counts.get(name):
            findings.append(Finding(name, "warning", f"{counts[name]} {what}"))
    for source in summary.get("sources", ()):
        findings += [Finding("fields", "warning", note) for note in source_notes(source)]
    return findings + [Finding("template", "ok", note) for note in summary["notes"]]


def judge(data: PreparedData, stats: DataStats) -> list[Finding]:
    """The verdict, and what only a look at all samples can tell.

    Args:
        data: prepared with the options of training.
        stats: of the same rows, without a limit on their length.
    """
    duplicates = stats.duplicates / stats.samples
    longest = f"max_length {stats.suggested_max_length} takes 99% of the samples whole"
    findings = [
        replace(finding, detail=f"{finding.detail}; {longest}")
        if finding.check == "length"
        else finding
        for finding in verdict(data.summary)
    ]
    status: Status = "warning" if duplicates > MAX_DUPLICATE_SHARE else "ok"
    detail = f"{stats.duplicates} samples ({duplicates:.1%}) are exact copies of others"
    return [*findings, Finding("duplicates", status, detail)]


def refuse_unfit(summary: Mapping[str, Any]) -> None:
    """Stop where the verdict says error.

    Raises:
        DataError: with every finding that is an error.
    """
    bad = [finding for finding in verdict(summary) if finding.status == "error"]
    if bad:
        raise DataError(
            "; ".join(f"{finding.check}: {finding.detail}" for finding in bad),
            where="data.train",
            fix=bad[0].fix or "look at the data with: trainkit data check",
        )


def _rows(summary: Mapping[str, Any]) -> Finding:
    totals, allowed = summary["totals"], summary["options"]["max_dropped"]
    share = totals["dropped"] / max(totals["rows"], 1)
    limit = MAX_DROPPED_SHARE if allowed is None else allowed
    many = totals["dropped"] > (limit if isinstance(limit, int) else limit * totals["rows"])
    above = f"above {limit} rows" if isinstance(limit, int) else f"above {limit:.0%}"
    return Finding(
        "rows",
        "error" if many else "warning" if share else "ok",
        f"{totals['kept']} of {totals['rows']} rows kept, {totals['dropped']} dropped "
        f"({share:.2%}; {above} is an error){_reasons(summary, 'dropped')}",
        "fix the rows that trainkit data check names, or allow more with data.max_dropped (10%)",
    )


def _cut(summary: Mapping[str, Any]) -> Finding:
    totals = summary["totals"]
    detail = f"{totals['cut']} of {totals['rows']} rows are used in part"
    return Finding("cut", "warning" if totals["cut"] else "ok", detail + _reasons(summary, "cut"))


def _length(summary: Mapping[str, Any]) -> Finding:
    totals, allowed = summary["totals"], summary["options"]["max_dropped"]
    lost = totals["trained_tokens_lost"]
    share = lost / max(totals["trained_tokens"] + lost, 1)
    limit = max(MAX_LOST_SHARE, allowed) if isinstance(allowed, float) else MAX_LOST_SHARE
    return Finding(
        "length",
        "error" if share > limit else "warning" if share else "ok",
        f"{share:.2%} of the trained tokens are lost to max_length (above {limit:.0%} is an error)",
        "raise data.max_length, or allow more with data.max_dropped as a share (10%)",
    )


def _mask(summary: Mapping[str, Any]) -> Finding:
    totals = summary["totals"]
    share = totals["trained_tokens"] / max(totals["tokens"], 1)
    few = "; few, since the prompts are so long" if share < MIN_TRAINED_SHARE else ""
    return Finding(
        "mask", "warning" if few else "ok", f"{share:.1%} of the tokens are trained{few}"
    )


def _stop_tokens(summary: Mapping[str, Any]) -> Finding:
    ends, counts, stops = summary["ends"], summary["counts"], summary["end_of_turn"]
    without = counts.get("turns_without_end", 0)
    turns = without + sum(ends.values())
    fix = "set data.append_eos: true, which ends each answer with the tokenizer's eos token"
    if summary["options"]["mask"] == "none" and not ends:
        return Finding("stop", "ok", "everything is trained, text ends included")
    if without:
        detail = f"{without} of {turns} trained turns have no end-of-turn token"
        if without > MAX_ENDLESS_SHARE * turns:
            return Finding("stop", "error", f"{detail}: the model would not learn to stop", fix)
        return Finding("stop", "warning", detail, fix)
    warnings = [warning for warning in summary["warnings"] if "stop" in warning]
    names = ", ".join(f"{token} ({index})" for token, index in stops.items()) or "eos of the text"
    if warnings:
        return Finding("stop", "warning", "; ".join(warnings))
    return Finding("stop", "ok", f"trained turns end with {names}")


def _reasons(summary: Mapping[str, Any], action: str) -> str:
    """The most frequent reasons why rows were ``dropped`` or ``cut``."""
    reasons = Counter[str]()
    for row in summary["files"]:
        reasons.update(row[f"{action}_for"])
    return "".join(f"; {reason}: {count}" for reason, count in reasons.most_common(5))
