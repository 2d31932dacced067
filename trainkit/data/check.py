"""The verdict on prepared data: would it train what it should?"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trainkit.data.prepared import PreparedData
from trainkit.data.stats import DataStats

Status = Literal["ok", "warning", "error"]

MAX_DROPPED_SHARE = 0.01
MAX_LOST_SHARE = 0.05
MAX_DUPLICATE_SHARE = 0.05
MIN_TRAINED_SHARE = 0.02


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        check: what.
        status: ``error`` means the data would train wrongly.
        detail: a sentence with the figures.
    """

    check: str
    status: Status
    detail: str


def judge(data: PreparedData, stats: DataStats) -> list[Finding]:
    """Look at everything that can be seen in prepared data.

    Args:
        data: prepared with the options of training.
        stats: of the same rows, without a limit on their length.
    """
    summary = data.summary
    totals, counts = summary["totals"], summary["counts"]
    dropped = totals["dropped"] / max(totals["rows"], 1)
    lost = totals["trained_tokens_lost"] / max(
        totals["trained_tokens"] + totals["trained_tokens_lost"], 1
    )
    duplicates = stats.duplicates / stats.samples
    reasons = _reasons(summary)
    findings = [
        Finding(
            "rows",
            "error" if dropped > MAX_DROPPED_SHARE else "warning" if dropped else "ok",
            f"{totals['kept']} of {totals['rows']} rows kept, {totals['dropped']} dropped "
            f"({dropped:.2%}; above {MAX_DROPPED_SHARE:.0%} is an error){reasons}",
        ),
        Finding(
            "length",
            "error" if lost > MAX_LOST_SHARE else "warning" if lost else "ok",
            f"{lost:.2%} of the trained tokens are lost to max_length (above "
            f"{MAX_LOST_SHARE:.0%} is an error); {stats.suggested_max_length} takes 99% of the "
            "samples whole",
        ),
        Finding(
            "mask",
            "error" if stats.trained_share < MIN_TRAINED_SHARE else "ok",
            f"{stats.trained_share:.1%} of the tokens are trained",
        ),
        _stop_tokens(summary),
        Finding(
            "duplicates",
            "warning" if duplicates > MAX_DUPLICATE_SHARE else "ok",
            f"{stats.duplicates} samples ({duplicates:.1%}) are exact copies of others",
        ),
    ]
    thinking = counts.get("turns_not_trained_for_stripped_thinking", 0)
    if thinking:
        detail = f"{thinking} turns are not trained: the template strips their thinking"
        findings.append(Finding("thinking", "warning", f"{detail}; see thinking: split"))
    for name, what in (
        ("escaped_special_tokens", "control tokens inside message text were broken up"),
        ("straddling_tokens", "tokens reach over a turn's border and are not trained"),
        ("double_bos", "texts begin with the bos token that the tokenizer adds; it is there once"),
        ("texts_in_pieces", "texts are longer than max_length and come in pieces"),
    ):
        if counts.get(name):
            findings.append(Finding(name, "warning", f"{counts[name]} {what}"))
    findings += [Finding("template", "ok", note) for note in summary["notes"]]
    return findings


def _stop_tokens(summary: Mapping[str, Any]) -> Finding:
    ends, counts = summary["end_of_turn"], summary["counts"]
    without = counts.get("turns_without_end", 0)
    if summary["options"]["mask"] == "none" and not ends:
        return Finding("stop", "ok", "everything is trained, text ends included")
    if not ends and without:
        detail = "no trained turn ends with a stop token: the model would never stop"
        return Finding("stop", "error", f"{detail}; set append_eos: true")
    warnings = [warning for warning in summary["warnings"] if "stop" in warning]
    names = ", ".join(f"{token} ({index})" for token, index in ends.items()) or "eos of the text"
    if warnings:
        return Finding("stop", "warning", "; ".join(warnings))
    return Finding("stop", "ok", f"trained turns end with {names}")


def _reasons(summary: Mapping[str, Any]) -> str:
    reasons: dict[str, int] = {}
    for row in summary["files"]:
        for reason, count in row["reasons"].items():
            reasons[reason] = reasons.get(reason, 0) + count
    ordered = sorted(reasons.items(), key=lambda item: -item[1])[:5]
    return "".join(f"; {reason}: {count}" for reason, count in ordered)
