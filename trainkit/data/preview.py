"""Samples made visible: which tokens are trained, who wrote them, and which samples look worst."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from trainkit.data.builder import SampleBuilder
from trainkit.data.formats import parse_row
from trainkit.data.ledger import read_ledger
from trainkit.data.messages import ROLES, Conversation, RowError, validate
from trainkit.data.options import IGNORE_INDEX, DataOptions, Source
from trainkit.data.prepared import PreparedData
from trainkit.data.reading import RawRow, decode, read_rows
from trainkit.data.source_store import LEDGER


@dataclass(frozen=True)
class Run:
    """Neighbouring tokens that are all trained, or all not.

    Attributes:
        text: decoded, control tokens included.
        trained: whether they are trained.
        num_tokens: how many.
    """

    text: str
    trained: bool
    num_tokens: int


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
    """

    id: str
    source: str
    why: str
    input_ids: list[int]
    labels: list[int]
    tokens: list[str]
    runs: tuple[Run, ...]

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
        }


def view(data: PreparedData, tokenizer: PreTrainedTokenizerBase, index: int, why: str) -> View:
    """Look at one sample."""
    sample = data[index]
    ids = [int(token) for token in sample["input_ids"]]
    mask = sample["loss_mask"].copy()
    mask[:1] = 0  # a first token is never predicted
    labels = [token if trained else IGNORE_INDEX for token, trained in zip(ids, mask, strict=True)]
    borders = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
    runs = tuple(
        Run(tokenizer.decode(ids[start:end]), bool(mask[start]), end - start)
        for start, end in itertools.pairwise(borders)
        if end > start
    )
    tokens = [tokenizer.decode([token]) for token in ids]
    name = data.source_names[sample["source"]]
    return View(data.sample_id(index), name, why, ids, labels, tokens, runs)


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


class RoleTable:
    """Counts who wrote the tokens of samples, by reading their rows again.

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
        self._tokens: Counter[str] = Counter()
        self._trained: Counter[str] = Counter()

    def rows(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Rows {role, tokens, trained_tokens}; ``template`` is what no turn wrote."""
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
                    self._count(index, raw, part)
                if raw.number >= last:
                    break
        return [
            {"role": role, "tokens": count, "trained_tokens": self._trained[role]}
            for role, count in self._tokens.most_common()
        ]

    def _count(self, index: int, raw: RawRow, part: int) -> None:
        sample = self.data[index]
        mask = sample["loss_mask"].copy()
        mask[:1] = 0
        roles = np.full(len(mask), "template", dtype=object)
        for role, first, last in self._turns(raw, self.data.parts[part].source, sample):
            roles[first:last] = role
        for role in set(roles.tolist()):
            self._tokens[role] += int(np.count_nonzero(roles == role))
            self._trained[role] += int(np.count_nonzero(mask[roles == role]))

    def _turns(
        self, raw: RawRow, source: Source, sample: dict[str, Any]
    ) -> list[tuple[str, int, int]]:
        assert raw.payload is not None
        parsed = parse_row(decode(raw.payload), source.format, source.columns)
        whole = [("text", 0, len(sample["input_ids"]))]
        if not isinstance(parsed, Conversation):
            return whole
        drafter = self.builder.drafter_of(parsed.template_kwargs)
        masks = self.options.mask != "none"
        conversation, _ = drafter.template.prepare(validate(parsed, needs_assistant=masks))
        for count in range(len(conversation.messages), 0, -1):
            # A cut or split sample is one of the shorter conversations.
            try:
                draft = drafter.draft(0, 0, conversation.first(count), frozenset(ROLES))
            except RowError:
                continue
            (tokens,) = drafter.encode([draft])
            size = min(len(tokens.input_ids), len(sample["input_ids"]))
            if np.array_equal(tokens.input_ids[:size], sample["input_ids"][:size]):
                return [
                    (draft.conversation.messages[span.turn].role, first, last)
                    for span, (first, last) in zip(draft.masked.spans, tokens.ranges, strict=True)
                ]
        return whole
