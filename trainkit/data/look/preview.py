"""Samples made visible: which tokens are trained, who wrote them, which rows are dropped."""

import html
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from trainkit.data.build.builder import SampleBuilder
from trainkit.data.build.datasets import PreparedData
from trainkit.data.build.ledger import LEDGER, read_ledger
from trainkit.data.options import DataOptions
from trainkit.data.read.formats import parse_row
from trainkit.data.read.messages import Comparison, Conversation, RowError, TextRow
from trainkit.data.read.reading import RawRow, decode, read_rows
from trainkit.options import Source
from trainkit.options.data import IGNORE_INDEX
from trainkit.terminal import visible

PER_REASON = 3
"""So many rows are shown for each reason."""

EXCERPT = 400
"""So many characters of a row are shown."""


@dataclass(frozen=True)
class DroppedRow:
    """One row that is not used.

    Attributes:
        id: ``file:line``.
        source: its source's name.
        reason: a stable code.
        detail: one sentence for people.
        excerpt: what the row begins with.
    """

    id: str
    source: str
    reason: str
    detail: str
    excerpt: str

    def to_dict(self) -> dict[str, Any]:
        """The keys that ``data preview --json`` prints for a dropped row."""
        return {
            "id": self.id,
            "source": self.source,
            "dropped": self.reason,
            "detail": self.detail,
            "row": self.excerpt,
        }


def dropped_rows(
    data: PreparedData, *, per_reason: int = PER_REASON, max_row_bytes: int = 0
) -> list[DroppedRow]:
    """The first dropped rows of each reason, in the order of the files.

    Args:
        data: prepared.
        per_reason: how many of each.
        max_row_bytes: read the rows again, up to this size, for their excerpts; 0 leaves them out.
    """
    return list(_dropped(data, per_reason, max_row_bytes))


def _dropped(data: PreparedData, per_reason: int, max_row_bytes: int) -> Iterator[DroppedRow]:
    seen: dict[str, int] = {}
    for part in data.parts:
        chosen = []
        for entry in read_ledger(part.store.directory / LEDGER):
            seen[entry.reason] = seen.get(entry.reason, 0) + (entry.action == "dropped")
            if entry.action == "dropped" and seen[entry.reason] <= per_reason:
                chosen.append(entry)
        texts: dict[tuple[int, int], str] = {}
        for file in {int(entry.file) for entry in chosen} if max_row_bytes else ():
            lines = {entry.line for entry in chosen if int(entry.file) == file}
            for raw in read_rows(part.paths[file], max_row_bytes=max_row_bytes):
                if raw.line in lines:
                    texts[file, raw.line] = _excerpt(raw.payload)
                if raw.line >= max(lines):
                    break
        for entry in chosen:
            file = int(entry.file)
            text = texts.get((file, entry.line), "")
            place = f"{part.files[file]}:{entry.line}"
            yield DroppedRow(place, part.name, entry.reason, entry.detail, text)


def _excerpt(payload: Any) -> str:
    if payload is None:
        return ""
    if isinstance(payload, bytes):
        text = payload[: 4 * EXCERPT].decode("utf-8", errors="replace")
    else:
        text = str(payload)
    return text[:EXCERPT] + ("…" if len(text) > EXCERPT else "")


@dataclass(frozen=True)
class Run:
    """Neighbouring tokens that are all trained, or all not.

    Attributes:
        text: decoded, control tokens included.
        trained: whether they are trained.
        num_tokens: how many.
        missed: they belong to an answer, and are not trained.
    """

    text: str
    trained: bool
    num_tokens: int
    missed: bool = False


@dataclass(frozen=True)
class View:
    """One sample to look at.

    Attributes:
        id: ``file:line``.
        source: its source's name.
        why: why this one is shown.
        input_ids, labels: as the model gets them; -100 is not trained.
        tokens: the text of each token.
        runs: the sample's text.
        missed: ranges of tokens that belong to an answer and are not trained.
    """

    id: str
    source: str
    why: str
    input_ids: list[int]
    labels: list[int]
    tokens: list[str]
    runs: tuple[Run, ...]
    missed: tuple[tuple[int, int], ...] = ()

    @property
    def num_trained_tokens(self) -> int:
        """Labels that are trained."""
        return sum(label != IGNORE_INDEX for label in self.labels)

    def to_dict(self) -> dict[str, Any]:
        """The keys that ``data preview --json`` prints."""
        return {
            "id": self.id,
            "source": self.source,
            "input_ids": self.input_ids,
            "labels": self.labels,
            "tokens": self.tokens,
            "num_trained_tokens": self.num_trained_tokens,
            "untrained_answer": [list(pair) for pair in self.missed],
        }


TRAINED, MISSED = 1, 2


def view(
    data: PreparedData,
    tokenizer: PreTrainedTokenizerBase,
    index: int,
    why: str,
    turns: Sequence[tuple[str, int, int]] = (),
) -> View:
    """Look at one sample.

    Args:
        data: prepared with ``tokenizer``.
        tokenizer: decodes.
        index: of the sample.
        why: it is shown.
        turns: who wrote its tokens, as :meth:`Authors.turns` says.
    """
    sample = data[index]
    ids = [int(token) for token in sample["input_ids"]]
    kinds = sample["loss_mask"].astype(np.uint8)
    kinds[:1] = 0  # a first token is never predicted
    labels = [token if kind else IGNORE_INDEX for token, kind in zip(ids, kinds, strict=True)]
    for role, first, last in turns:
        if role in ANSWERS:
            kinds[first:last][kinds[first:last] == 0] = MISSED
    borders = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(ids)]
    ranges = [(start, end) for start, end in itertools.pairwise(borders) if end > start]
    runs = tuple(
        Run(
            tokenizer.decode(ids[start:end]),
            kinds[start] == TRAINED,
            end - start,
            kinds[start] == MISSED,
        )
        for start, end in ranges
    )
    missed = tuple((start, end) for start, end in ranges if kinds[start] == MISSED)
    tokens = [tokenizer.decode([token]) for token in ids]
    name = data.source_names[sample["source"]]
    return View(data.sample_id(index), name, why, ids, labels, tokens, runs, missed)


def choose(data: PreparedData, count: int, *, seed: int) -> list[tuple[int, str]]:
    """Which samples to show: ``count`` at random, then the worst offenders.

    Returns:
        sample indices, each with the reason it was chosen.
    """
    generator = np.random.default_rng(seed)
    drawn = generator.choice(len(data), size=min(count, len(data)), replace=False)
    chosen = {int(index): "random" for index in sorted(drawn)}
    shares = data.num_trained / np.maximum(data.lengths, 1)
    worst = ((int(np.argmax(data.lengths)), "longest"), (int(np.argmin(shares)), "least trained"))
    for index, why in worst:
        chosen.setdefault(index, why)
    cut = _most_cut(data)
    if cut is not None:
        chosen.setdefault(cut, "most cut")
    return list(chosen.items())


def _most_cut(data: PreparedData) -> int | None:
    """The kept sample whose row lost the most tokens."""
    best: tuple[int, int] | None = None
    for part, start in zip(data.parts, data.starts, strict=True):
        for entry in read_ledger(part.store.directory / LEDGER):
            if entry.action != "cut" or (best is not None and entry.tokens <= best[0]):
                continue
            places = (part.store.file == int(entry.file)) & (part.store.line == entry.line)
            found = np.flatnonzero(places)
            if len(found):
                best = (entry.tokens, int(start) + int(found[0]))
    return None if best is None else best[1]


ANSWERS = ("assistant", "completion")
"""Whose words are to be trained."""


class Authors:
    """Says who wrote the tokens of samples, by reading their rows again.

    Args:
        data: the prepared data.
        tokenizer, options: it was prepared with.
    """

    def __init__(
        self, data: PreparedData, tokenizer: PreTrainedTokenizerBase, options: DataOptions
    ) -> None:
        self.data = data
        self.options = options
        self.builder = SampleBuilder(tokenizer, options)
        self._turns: dict[int, list[tuple[str, int, int]]] = {}

    def read(self, indices: Sequence[int]) -> None:
        """Read the rows of samples, each file once."""
        wanted: dict[tuple[int, int], dict[int, list[int]]] = {}
        for index in indices:
            part, place = self.data.find(index)
            store = self.data.parts[part].store
            rows = wanted.setdefault((part, int(store.file[place])), {})
            rows.setdefault(int(store.row[place]), []).append(index)
        for (part, file), rows in wanted.items():
            path = self.data.parts[part].paths[file]
            last = max(rows)
            for raw in read_rows(path, max_row_bytes=self.options.max_row_bytes):
                for index in rows.get(raw.number, ()):
                    source = self.data.parts[part].source
                    self._turns[index] = self._of_row(raw, source, self.data[index])
                if raw.number >= last:
                    break

    def turns(self, index: int) -> list[tuple[str, int, int]]:
        """Rows (role, first token, one past the last) of a sample that was read."""
        return self._turns[index]

    def table(self) -> list[dict[str, Any]]:
        """Rows {role, tokens, trained_tokens}; ``template`` is what no turn wrote."""
        written: Counter[str] = Counter()
        trained: Counter[str] = Counter()
        for index, turns in self._turns.items():
            mask = self.data[index]["loss_mask"].copy()
            mask[:1] = 0
            roles = np.full(len(mask), "template", dtype=object)
            for role, first, last in turns:
                roles[first:last] = role
            for role in set(roles.tolist()):
                written[role] += int(np.count_nonzero(roles == role))
                trained[role] += int(np.count_nonzero(mask[roles == role]))
        return [
            {"role": role, "tokens": count, "trained_tokens": trained[role]}
            for role, count in written.most_common()
        ]

    def _of_row(
        self, raw: RawRow, source: Source, sample: dict[str, Any]
    ) -> list[tuple[str, int, int]]:
        assert raw.payload is not None
        parsed = parse_row(decode(raw.payload), source.format, source.columns)
        size = len(sample["input_ids"])
        if isinstance(parsed, Comparison):
            source_place, place = self.data.find(sample["id"])
            part = int(self.data.parts[source_place].store.part[place])
            parsed = parsed.conversations[part]
        if isinstance(parsed, TextRow) and parsed.prompt:
            return self._of_completion(parsed, sample)
        if not isinstance(parsed, Conversation):
            return [("text", 0, size)]
        drafter = self.builder.drafter_of(parsed)
        conversation, _ = self.builder.read(parsed, source)
        found = self.options.mask != "none"  # the switch that every turn's place is looked for with
        turns = tuple(replace(message, train=found) for message in conversation.messages)
        conversation = replace(conversation, messages=turns)
        for count in range(len(conversation.messages), 0, -1):
            # A cut or split sample is one of the shorter conversations.
            try:
                draft = drafter.draft(0, 0, conversation.first(count))
            except RowError:
                continue
            (tokens,) = drafter.encode([draft])
            common = min(len(tokens.input_ids), size)
            if np.array_equal(tokens.input_ids[:common], sample["input_ids"][:common]):
                return [
                    (draft.conversation.messages[span.turn].role, first, last)
                    for span, (first, last) in zip(draft.masked.spans, tokens.ranges, strict=True)
                ]
        return [("text", 0, size)]

    def _of_completion(self, row: TextRow, sample: dict[str, Any]) -> list[tuple[str, int, int]]:
        spans = [(len(row.prompt), len(row.prompt) + len(row.text))]
        whole = [row.prompt + row.text]
        (tokens,) = self.builder.encoder.encode(whole, [spans], add_special_tokens=True)
        size, first = len(sample["input_ids"]), tokens.ranges[0][0]
        ids = tokens.input_ids
        if len(ids) > 1 and ids[0] == ids[1] != sample["input_ids"][1]:
            first -= 1  # the bos that was there twice
        return [("prompt", 0, first), ("completion", first, size)]


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem;
       color: #1a1a1a; background: #fff; }
h1 { font-size: 1.3rem; } h2 { font-size: 1rem; margin: 2rem 0 .3rem; overflow-wrap: anywhere; }
.note { color: #555; margin: 0 0 .6rem; }
pre { font: 13px/1.6 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
      background: #f6f6f6; padding: .8rem 1rem; border-radius: 6px; color: #767676; }
.trained { color: #00391d; background: #c9ecd6; border-bottom: 2px solid #11803f; }
.missed { color: #7a0010; background: #ffd9dc; border-bottom: 2px dashed #c2001d; }
.control { border: 1px solid currentColor; border-radius: 3px; padding: 0 .15em; }
.space { opacity: .55; }
table { border-collapse: collapse; } th, td { padding: .2rem .9rem .2rem 0; text-align: right;
      border-bottom: 1px solid #ddd; } th:first-child, td:first-child { text-align: left; }
@media (prefers-color-scheme: dark) {
  body { color: #e8e8e8; background: #16181a; } pre { background: #202326; color: #9a9a9a; }
  .note { color: #aaa; } .missed { color: #ffd5d9; background: #5a1018; }
  .trained { color: #d6ffe6; background: #14492c; border-color: #4cc27f; }
  th, td { border-color: #444; } }
"""


def page(
    views: Sequence[View],
    roles: Sequence[dict[str, Any]],
    control: Sequence[str],
    title: str,
    dropped: Sequence[DroppedRow] = (),
) -> str:
    """The page.

    Args:
        views: samples to show.
        roles: rows {role, tokens, trained_tokens}.
        control: the tokenizer's control tokens, framed where they occur.
        title: the page's heading.
        dropped: rows that are not used.
    """
    rows = "".join(
        f"<tr><td>{html.escape(row['role'])}</td><td>{row['tokens']:,}</td>"
        f"<td>{row['trained_tokens']:,}</td></tr>"
        for row in roles
    )
    samples = "".join(_sample(view, control) for view in views)
    samples += "".join(_dropped_html(row) for row in dropped)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>"
        f"<h1>{html.escape(title)}</h1>"
        '<p class="note"><span class="trained">Underlined on green</span> is trained; grey is not. '
        '<span class="missed">Dashed on red</span> are words of an answer that are not trained. '
        '<span class="control">Framed</span> text is one control token. '
        "↵ is a line break, · a blank before one.</p>"
        "<table><tr><th>written by</th><th>tokens</th><th>trained</th></tr>"
        f"{rows}</table>{samples}</html>\n"
    )


def _sample(view: View, control: Sequence[str]) -> str:
    pieces = []
    for run in view.runs:
        text = _marked(run.text, control)
        kind = "trained" if run.trained else "missed" if run.missed else ""
        pieces.append(f'<span class="{kind}">{text}</span>' if kind else text)
    share = view.num_trained_tokens / len(view.input_ids)
    return (
        f"<h2>{html.escape(visible(view.id))}</h2>"
        f'<p class="note">{html.escape(view.why)} · source {html.escape(view.source)} · '
        f"{len(view.input_ids):,} tokens, {view.num_trained_tokens:,} trained ({share:.0%})</p>"
        f"<pre>{''.join(pieces)}</pre>"
    )


def _dropped_html(row: DroppedRow) -> str:
    title, why, text = (html.escape(visible(t)) for t in (row.id, row.detail, row.excerpt))
    note = f"not used ({html.escape(row.reason)}): {why}"
    return f'<h2>{title}</h2><p class="note">{note}</p><pre>{text}</pre>'


def _marked(text: str, control: Sequence[str]) -> str:
    text = html.escape(visible(text), quote=False)
    for token in control:
        framed = html.escape(token, quote=False)
        text = text.replace(framed, f'<span class="control">{framed}</span>')
    text = re.sub(r" +(?=\n|$)", lambda blanks: "·" * len(blanks[0]), text)
    return text.replace("\n", '<span class="space">↵</span>\n')
