"""What ``data.json`` says about prepared data, and what makes it unfit to train on."""

import contextlib
import hashlib
import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from trainkit.data.datasets import Part, PreparedData, num_of_trained
from trainkit.data.files import DAMAGED, open_bytes, read_rows
from trainkit.data.formats import decode_row, guess_columns
from trainkit.data.images import REPAIRS
from trainkit.data.options import DataOptions
from trainkit.data.store import LEFT_OUT, Entry, tokenizer_digest
from trainkit.errors import DataError
from trainkit.options.training import OBJECTIVE_FORMATS

MIN_SHARE = 0.01
"""A new stop token ends more than this share of the trained turns."""


def end_of_turns(
    ends: Counter[str],
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
    num_trained_of: Callable[[int], int],
) -> tuple[dict[str, int], list[str]]:
    """Which end-of-turn tokens may be written as stop tokens of the trained model.

    A token that was none before must have proved itself over the whole data set: a stop token that
    also stands inside answers would cut served answers short.

    Returns:
        Token and id of every such end, and what to say of those that were none before.
    """
    found, said = {}, []
    for end, count in sorted(ends.items()):
        index = int(tokenizer.convert_tokens_to_ids(end))
        is_known = index in {*options.stop_token_ids, tokenizer.eos_token_id}
        # Where everything is trained, an end of the user's turn proves nothing.
        if is_known or (
            count > MIN_SHARE * ends.total()
            and (options.mask == "none" or num_trained_of(index) <= count)
        ):
            found[end] = index
        if not is_known:
            what = (
                "generation will not stop at it unless its id is in generation_config.eos_token_id "
                "(trainkit writes it there)"
                if end in found
                else f"it ends {count} of {ends.total()} trained turns and is inside others, or "
                "ends too few, so it is not made one either"
            )
            said.append(
                f"the trained end-of-turn token {end!r} is not a stop token of this model; {what}"
            )
    return found, said


def summary_of(
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
    *,
    files: Sequence[Mapping[str, Any]],
    sources: Sequence[Mapping[str, Any]],
    counts: Counter[str],
    ends: Counter[str],
    notes: Iterable[str],
    num_trained_of: Callable[[int], int],
) -> dict[str, Any]:
    """What ``data.json`` says of prepared and of streamed data."""
    stops, warnings = end_of_turns(ends, tokenizer, options, num_trained_of)
    endless, twice = counts["turns_without_end"], listed_twice(files)
    if endless:
        warnings.append(
            f"{endless} of {endless + ends.total()} trained turns have no end-of-turn token, so "
            "the model may not learn to stop; append_eos: true puts the tokenizer's eos there"
        )
    warnings += [f"{counts[name]} {text}" for name, text in TOLD.items() if counts[name]]
    template = json.dumps(options.chat_template or tokenizer.chat_template, sort_keys=True)
    return {
        "files": files,
        "sources": sources,
        "counts": {k: n for k, n in sorted(counts.items()) if not k.startswith("ignored:")},
        "ends": dict(sorted(ends.items())),
        "end_of_turn": stops,
        "notes": sorted(set(notes)),
        "warnings": [*twice, *warnings],
        "listed_twice": twice,
        "template_sha256": hashlib.sha256(
            json.dumps(template, sort_keys=True).encode()
        ).hexdigest(),
        "tokenizer_sha256": tokenizer_digest(tokenizer),
        "options": json.loads(json.dumps(options.model_dump(), default=list)),
    }


TOLD: Mapping[str, str] = {
    "turns_not_trained_for_stripped_thinking": "turns are not trained because the template strips "
    "their thinking; thinking: split trains each with its own history",
    "turns_trained_without_their_thinking": "turns are trained without their thinking, since the "
    "template never prints it; thinking: preserve keeps it",
    "tokens_without_mask": "rows of input_ids have no labels and no mask, so every token of theirs "
    "is trained",
    "other_turns_switched_on": "turns of other roles are trained, since a switch of their own says "
    "so",
}
"""What a count of the samples means, where the user should know before training."""

NUM_EXAMPLES = 3
"""So many bad rows are quoted in an error; all of them are in the ledger."""


def look_at(file: Path | str, model: str, *options: str) -> str:
    name = "check" if options else "preview"
    words = ["trainkit", "data", name, "--data", str(file), "--model", model, *options]
    return f"look at its rows with: {shlex.join(words)}"


def _unknown_columns(file: Path, model: str) -> str:
    """What to do about rows of no known format, with the file's own columns."""
    first = next(read_rows(file))
    row = decode_row(first)
    columns = guess_columns(row) if isinstance(row, Mapping) else {}
    if not columns:
        return look_at(file, model)
    pairs = [f"{ours}={theirs}" for ours, theirs in columns.items()]
    given = ", ".join(f"{ours}: {json.dumps(name)}" for ours, name in columns.items())
    command = look_at(file, model, "--columns", ",".join(pairs))
    return (
        f"say which column is which, as in\n  data: {{train: [{{path: {json.dumps(str(file))}, "
        f"columns: {{{given}}}}}]}}\n  {command}"
    )


def check_files(part: Part, entries: Sequence[Entry], model: str) -> None:
    """Refuse files without rows, or with nothing to train."""
    for row, file in zip(part.rows, part.paths, strict=True):
        reasons = ", ".join(f"{reason}: {n}" for reason, n in row["reasons"].items())
        if row["rows"] == 0 and row["not_chosen"] == 0:
            raise DataError(
                "the file holds no rows", where=row["path"], fix="check how it was made"
            )
        if row["rows"] and row["trained_tokens"] == 0:
            # One row for each thing that is wrong.
            bad = {e.detail: e for e in reversed(entries) if e.file == row["path"]}
            few = sorted(bad.values(), key=lambda entry: entry.line)[:NUM_EXAMPLES]
            examples = "".join(f"\n  {e.file}:{e.line}: {e.detail}" for e in few)
            if set(row["reasons"]) == {"too_long"}:
                fix = "raise data.max_length, or choose another data.truncation"
            elif part.source.format in OBJECTIVE_FORMATS.values():
                fix = "correct the rows, or take them out: docs/guides/preferences.md has the forms"
            elif set(row["reasons"]) == {"unknown_format"}:
                fix = _unknown_columns(file, model)
            else:
                fix = look_at(file, model)
            raise DataError(
                f"no token of this file would be trained ({row['rows']} rows; {reasons}){examples}",
                where=row["path"],
                fix=fix,
            )


def check_dropped(rows: Sequence[dict[str, Any]], options: DataOptions) -> None:
    limit = options.max_dropped
    if limit is None:
        return
    dropped = sum(row["dropped"] for row in rows)
    total = sum(row["rows"] for row in rows)
    allowed = limit if isinstance(limit, int) else limit * total
    if dropped > allowed:
        worst = max(rows, key=lambda row: row["dropped"])
        reasons = ", ".join(f"{reason}: {n}" for reason, n in worst["reasons"].items())
        raise DataError(
            f"{dropped} of {total} rows were dropped, more than max_dropped {limit} "
            f"(most in this file: {reasons})",
            where=worst["path"],
            fix="fix the rows that dropped.jsonl names, or raise data.max_dropped",
        )


NUM_IGNORED = 20
"""So many fields without a part are named; rows may have one for each of their ids."""


def ignored_fields(counts: Mapping[str, int]) -> dict[str, int]:
    """The fields of a source's rows that play no part, and how many rows have them."""
    prefix = "ignored:"
    found = Counter({k.removeprefix(prefix): n for k, n in counts.items() if k.startswith(prefix)})
    named = dict(found.most_common(NUM_IGNORED))
    rest = len(found) - len(named)
    return named | ({f"{rest} other fields": 1} if rest else {})


def dropped_rows(entries: Sequence[Entry]) -> dict[str, dict[str, Any]]:
    """Dropped rows by reason, the most frequent first: how many, and where the first one is."""
    found: dict[str, dict[str, Any]] = {}
    for entry in entries:
        if entry.action == "dropped":
            place = {"rows": 0, "first": f"{entry.file}:{entry.line}", "detail": entry.detail}
            found.setdefault(entry.reason, place)["rows"] += 1
    return dict(sorted(found.items(), key=lambda item: -item[1]["rows"]))


def notes_of(summary: Mapping[str, Any], what: str) -> list[str]:
    """What a person should read of prepared data besides its size."""
    notes = [note for source in summary["sources"] for note in source_notes(source)]
    dropped = summary["dropped"]
    if dropped:
        total = sum(row["rows"] for row in dropped.values())
        lines = [
            f"  {reason}: {row['rows']}, the first is {row['first']}: {row['detail']}"
            for reason, row in dropped.items()
        ]
        rows = summary["totals"]["rows"]
        verb = "left out" if dropped.keys() <= LEFT_OUT else "dropped"
        notes.append("\n".join([f"{what}: {total} of {rows} rows are {verb}", *lines]))
    return notes


def source_notes(source: Mapping[str, Any]) -> list[str]:
    """What there is to say of one source: fields that play no part, files that are not read."""
    notes = []
    fields = ", ".join(f"{name} ({count})" for name, count in source["ignored_fields"].items())
    if fields:
        notes.append(f"{source['name']}: fields of its rows that are not used: {fields}")
    if source["not_read"]:
        files = source["not_read"]
        more = f" and {len(files) - NUM_EXAMPLES} more" if len(files) > NUM_EXAMPLES else ""
        shown = ", ".join(files[:NUM_EXAMPLES])
        notes.append(f"{source['name']}: files that are not read: {shown}{more}")
    return notes


def listed_twice(files: Sequence[Mapping[str, Any]]) -> list[str]:
    """A warning for every file that is there twice: by another path, a link, or as a copy."""
    groups: dict[Any, list[str]] = {}
    by_head = any("samples" not in file for file in files)
    for file in files:
        marks = _marks(file, by_head)
        names = next((groups[mark] for mark in marks if mark in groups), [])
        names.append(f"{file['path']} (source {file['source']})")
        groups |= dict.fromkeys(marks, names)
    return [
        f"the same rows are read {len(names)} times{' (or the first ones)' * by_head}: "
        f"{', '.join(names)}; list each file once (epochs repeats a source's rows on purpose)"
        for names in {id(names): names for names in groups.values()}.values()
        if len(names) > 1
    ]


def _marks(file: Mapping[str, Any], by_head: bool) -> list[Any]:
    """Its bytes, its samples (those of a compressed copy, too), its place; how it begins."""
    found: list[Any] = [file[key] for key in ("sha256", "samples_sha256") if file.get(key)]
    # Of the hub, or damaged, which its reader says.
    with contextlib.suppress(*DAMAGED, EOFError, DataError):
        stat = Path(file["path"]).stat()
        found.append((stat.st_dev, stat.st_ino))
        if by_head:  # a stream is not read ahead of its training
            with open_bytes(Path(file["path"])) as stream:
                found.append(hashlib.sha256(stream.read(_HEAD_BYTES)).digest())
    return found


def trained_and_evaluated(
    train: PreparedData | Mapping[str, Any], held: PreparedData | None
) -> list[str]:
    """A warning where rows are evaluated that are trained on.

    ``train`` is the summary where its rows are streamed: then by content and path of the files.
    """
    if held is None:
        return []
    if isinstance(train, PreparedData):
        both = [f"{num} rows of {name}" for name, num in num_of_trained(train, held) if num]
    else:
        trained: set[Any] = set().union(*(_marks(file, True) for file in train["files"]))
        files = (file for file in held.summary["files"] if trained.intersection(_marks(file, True)))
        both = [file["path"] for file in files]
    if not both:
        return []
    return [
        f"evaluation data that is also trained on: {', '.join(both)}; eval_loss then says how much "
        "was memorised, not how well new text goes (data.eval: 2% holds conversations out)"
    ]


Status = Literal["ok", "warning", "error"]

_HEAD_BYTES = 1 << 16

MAX_DROPPED_SHARE = 0.01
MAX_LOST_SHARE = 0.05
MIN_TRAINED_SHARE = 0.02
MAX_ENDLESS_SHARE = 0.01


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        status: ``error`` means the data would train wrongly.
    """

    check: str
    status: Status
    detail: str
    fix: str = ""


def verdict(summary: Mapping[str, Any]) -> list[Finding]:
    """What ``data check``, a run and its dry run all say of the same data."""
    counts, warnings = summary["counts"], summary["warnings"]
    found = [*_losses(summary), _stop_tokens(summary)]
    found += [Finding("files", "warning", twice) for twice in summary["listed_twice"]]
    found += [Finding("thinking", "warning", each) for each in warnings if "thinking" in each]
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
            found.append(Finding(name, "warning", f"{counts[name]} {what}"))
    if images := (summary.get("totals") or {}).get("images"):
        tokens = summary["totals"]["image_tokens"]
        done = [f"{counts[name]} {what}" for name, what in REPAIRS.items() if counts.get(name)]
        said = "; ".join([f"{images} images in {tokens} of the tokens, none trained", *done])
        found.append(Finding("images", "ok", said))
    notes = (note for source in summary.get("sources", ()) for note in source_notes(source))
    found += [Finding("fields", "warning", note) for note in notes]
    return found + [Finding("template", "ok", note) for note in summary["notes"]]


def refuse_unfit(summary: Mapping[str, Any]) -> None:
    """Stop where the verdict says error."""
    bad = [finding for finding in verdict(summary) if finding.status == "error"]
    if bad:
        raise DataError(
            "; ".join(f"{finding.check}: {finding.detail}" for finding in bad),
            where="data.train",
            fix=bad[0].fix or "look at the data with: trainkit data check",
        )


def _losses(summary: Mapping[str, Any]) -> list[Finding]:
    """What is lost on the way to the samples; nothing of a stream, which has no totals."""
    totals, allowed = summary.get("totals"), summary["options"]["max_dropped"]
    if totals is None:
        return []

    def reasons(action: str) -> str:
        found = sum((Counter(row[f"{action}_for"]) for row in summary["files"]), Counter[str]())
        return "".join(f"; {reason}: {count}" for reason, count in found.most_common(5))

    rows, trained, lost = totals["rows"], totals["trained_tokens"], totals["trained_tokens_lost"]
    limit = MAX_DROPPED_SHARE if allowed is None else allowed
    is_number = isinstance(limit, int)
    too_many = totals["dropped"] > (limit if is_number else limit * rows)
    above = f"above {limit} rows" if is_number else f"above {limit:.0%}"
    share_lost = lost / max(trained + lost, 1)
    most_lost = max(MAX_LOST_SHARE, allowed) if isinstance(allowed, float) else MAX_LOST_SHARE
    share_trained = trained / max(totals["tokens"], 1)
    left_out = f"{n} left out as data says, " if (n := totals["left_out"]) else ""
    few = "; few, since the prompts are so long" if share_trained < MIN_TRAINED_SHARE else ""
    return [
        Finding(
            "rows",
            "error" if too_many else "warning" if totals["dropped"] else "ok",
            f"{totals['kept']} of {rows} rows kept, {left_out}{totals['dropped']} dropped "
            f"({totals['dropped'] / max(rows, 1):.2%}; {above} is an error){reasons('dropped')}",
            "fix the rows that trainkit data check names, or allow more with data.max_dropped "
            "(10%)",
        ),
        Finding(
            "cut",
            "warning" if totals["cut"] else "ok",
            f"{totals['cut']} of {rows} rows are used in part{reasons('cut')}",
        ),
        Finding(
            "length",
            "error" if share_lost > most_lost else "warning" if share_lost else "ok",
            f"{share_lost:.2%} of the trained tokens are lost to max_length (above "
            f"{most_lost:.0%} is an error)",
            "raise data.max_length, or allow more with data.max_dropped as a share (10%)",
        ),
        Finding(
            "mask",
            "warning" if few else "ok",
            f"{share_trained:.1%} of the tokens are trained{few}",
        ),
    ]


def _stop_tokens(summary: Mapping[str, Any]) -> Finding:
    ends, stops = summary["ends"], summary["end_of_turn"]
    without = summary["counts"].get("turns_without_end", 0)
    turns = without + sum(ends.values())
    if summary["options"]["mask"] == "none" and not ends:
        return Finding("stop", "ok", "everything is trained, text ends included")
    if without:
        fix = "set data.append_eos: true, which ends each answer with the tokenizer's eos token"
        detail = f"{without} of {turns} trained turns have no end-of-turn token"
        if without > MAX_ENDLESS_SHARE * turns:
            return Finding("stop", "error", f"{detail}: the model would not learn to stop", fix)
        return Finding("stop", "warning", detail, fix)
    if warnings := [warning for warning in summary["warnings"] if "stop" in warning]:
        return Finding("stop", "warning", "; ".join(warnings))
    names = ", ".join(f"{token} ({index})" for token, index in stops.items()) or "eos of the text"
    return Finding("stop", "ok", f"trained turns end with {names}")
