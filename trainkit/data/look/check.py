"""The verdict on prepared data: would it train what it should?"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from trainkit.data.build.datasets import PreparedData
from trainkit.data.build.summary import source_notes
from trainkit.data.look.stats import DataStats
from trainkit.errors import DataError

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
    thinking = counts.get("turns_not_trained_for_stripped_thinking", 0)
    if thinking:
        detail = f"{thinking} turns are not trained: the template strips their thinking"
        findings.append(Finding("thinking", "warning", f"{detail}; see thinking: split"))
    bare = counts.get("turns_trained_without_their_thinking", 0)
    if bare:
        detail = f"{bare} turns are trained without their thinking, which the template never prints"
        findings.append(Finding("thinking", "warning", f"{detail}; see thinking: preserve"))
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
