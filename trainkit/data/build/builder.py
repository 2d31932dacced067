"""Rows to samples: decode, parse, render, mask, tokenise, fit to ``max_length``.

One :class:`SampleBuilder` lives in each worker process. It never raises for a bad row: every row
ends as samples, as an entry for the ledger, or as both.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from trainkit.data.build.drafts import Draft, Drafter, Event, cut_tokens
from trainkit.data.options import DataOptions
from trainkit.data.read.formats import detect
from trainkit.data.read.messages import (
    Comparison,
    Conversation,
    ParsedRow,
    RowError,
    TextRow,
    TokenRow,
    switched,
    validate,
)
from trainkit.data.read.reading import RawRow
from trainkit.data.read.row_fields import without_effect
from trainkit.data.read.rows import decode_row, read_row
from trainkit.data.render.choice import options_for, refuse_unread
from trainkit.data.render.encode import Encoder
from trainkit.data.render.template import THINK_CLOSE
from trainkit.errors import DataError, TrainkitError
from trainkit.options import Source

MAX_DRAFTERS = 16
"""So many sets of row variables are kept at work; rows with more of them only take longer."""


@dataclass
class BuiltRows:
    """What became of a run of rows, in few large pieces so that it travels well between processes.

    Attributes:
        num_kept: rows of which at least one sample remains.
        input_ids, loss_mask: all samples end to end.
        lengths, rows, parts: one number per sample; ``rows`` counts within the run.
        events: for the ledger.
        counts: formats (``format:<name>``) and things worth telling, by name.
        ends: end-of-turn tokens that are trained, and how many turns each ends.
        notes: what a person should know about the template.
    """

    num_kept: int = 0
    input_ids: list[np.ndarray] = field(default_factory=list)
    loss_mask: list[np.ndarray] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    notes: set[str] = field(default_factory=set)

    def add(self, ids: np.ndarray, mask: np.ndarray, row: int, part: int) -> None:
        """Append one sample."""
        self.input_ids.append(ids)
        self.loss_mask.append(mask)
        self.lengths.append(len(ids))
        self.rows.append(row)
        self.parts.append(part)

    def drop_incomplete(self, num_samples: Mapping[int, int]) -> None:
        """Drop what is left of rows that have fewer samples than they must have."""
        found = Counter(self.rows)
        lost = {row for row, count in num_samples.items() if 0 < found[row] < count}
        if not lost:
            return
        kept = [place for place, row in enumerate(self.rows) if row not in lost]
        columns: list[list[Any]] = [self.input_ids, self.loss_mask]
        columns += [self.lengths, self.parts, self.rows]
        for column in columns:
            column[:] = [column[place] for place in kept]

    def sealed(self) -> "BuiltRows":
        """The same with one array each."""
        if self.input_ids:
            self.input_ids = [np.concatenate(self.input_ids)]
            self.loss_mask = [np.concatenate(self.loss_mask)]
        return self


class SampleBuilder:
    """Builds samples for one tokenizer and one set of options.

    Args:
        tokenizer: a fast one; it needs a chat template only when conversations come.
        options: how rows become samples.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: DataOptions) -> None:
        self.tokenizer = tokenizer
        self.options = options
        self.encoder = Encoder(tokenizer)
        self._drafters: dict[str, Drafter] = {}
        self._vocabulary = len(tokenizer)

    def drafter_of(self, conversation: Conversation) -> Drafter:
        """The chat template at work on a conversation, which may have variables of its own.

        Raises:
            RowError: with these variables the template's masks cannot be proved.
        """
        if not self._drafters:
            refuse_unread(self.tokenizer, self.options)
        options = options_for(conversation, self.tokenizer, self.options)
        key = json.dumps([options.template_kwargs, options.chat_template], sort_keys=True)
        if key not in self._drafters:
            try:
                found = Drafter(self.tokenizer, options, self.encoder)
            except TrainkitError as error:
                if options is self.options:
                    raise
                own = dict(conversation.template_kwargs)
                reason = "template_kwargs" if own else "tool_template"
                detail = f"with {json.dumps(own)[:200] if own else 'tools'}: {error.what}"
                raise RowError(reason, detail) from error
            while len(self._drafters) >= MAX_DRAFTERS:
                self._drafters.pop(next(iter(self._drafters)))
            self._drafters[key] = found
        return self._drafters[key]

    def build(self, rows: Sequence[RawRow], source: Source) -> BuiltRows:
        """Turn rows into samples.

        Raises:
            DataError: only about the whole run, such as a template without proof.
        """
        built = BuiltRows()
        drafts: dict[Drafter, list[Draft]] = {}
        texts: list[tuple[int, TextRow]] = []
        num_compared: dict[int, int] = {}
        for number, row in enumerate(rows):
            try:
                parsed = self._parse(row, source, built)
                if isinstance(parsed, Conversation):
                    mine = self._drafts(number, parsed, source, built)
                    drafts.setdefault(self.drafter_of(parsed), []).extend(mine)
                elif isinstance(parsed, Comparison):
                    mine = self._compared(number, parsed, source, built)
                    drafter = self.drafter_of(parsed.conversations[0])
                    drafts.setdefault(drafter, []).extend(mine)
                    num_compared[number] = len(mine)
                elif isinstance(parsed, TextRow):
                    texts.append((number, parsed))
                else:
                    self._keep_tokens(number, parsed, built)
            except RowError as error:
                built.events.append(Event(number, "dropped", error.reason, error.detail))
        for drafter, mine in drafts.items():
            self._keep_conversations(drafter, mine, built)
        if texts:
            self._keep_texts(texts, built)
        built.drop_incomplete(num_compared)
        self._check_embeddings(built, rows)
        kept = set(built.rows)
        built.num_kept = len(kept)
        # A row of several samples may lose one of them: the row is then cut, not dropped.
        # What was cut or repaired of a row that is dropped in the end is nothing that was used.
        built.events = [
            replace(event, action="cut")
            if event.action == "dropped" and event.row in kept
            else event
            for event in built.events
            if event.action == "dropped" or event.row in kept
        ]
        for drafter in drafts:
            if drafter.options.template_kwargs == self.options.template_kwargs:
                built.notes |= set(drafter.template.notes)
        return built.sealed()

    def _check_embeddings(self, built: BuiltRows, rows: Sequence[RawRow]) -> None:
        """Stop at a token that the model has no row of its embedding for."""
        size = self.options.num_embeddings
        if size is None or self._vocabulary <= size:
            return
        for ids, number in zip(built.input_ids, built.rows, strict=True):
            largest = int(ids.max(initial=-1))
            if largest >= size:
                token = self.tokenizer.convert_ids_to_tokens(largest)
                raise DataError(
                    f"the tokenizer is larger than the model's embedding: it gives {token!r} the "
                    f"id {largest} (in the row of line {rows[number].line}), and the embedding has "
                    f"{size} rows",
                    where="model.name_or_path",
                    fix="use the model's own tokenizer, or grow the model: "
                    "model.resize_token_embeddings(len(tokenizer)), then save both",
                )

    # -- rows -----------------------------------------------------------------------------------

    def _parse(self, raw: RawRow, source: Source, built: BuiltRows) -> ParsedRow:
        row = decode_row(raw)
        parsed = read_row(row, source.format, source.columns)
        name: str = source.format
        if name == "auto":
            name = (detect(row) if isinstance(row, Mapping) else None) or "messages"
        built.counts[f"format:{name}"] += 1
        built.counts.update(f"ignored:{field}" for field in parsed.ignored)
        return parsed

    def read(self, parsed: Conversation, source: Source) -> tuple[Conversation, int]:
        """A conversation as it is rendered, with a switch on every turn.

        Returns:
            it, and how many control tokens in its texts were broken up.

        Raises:
            RowError: it breaks a rule of conversations, or nothing of it could be trained.
        """
        mask = self.options.mask
        turns = switched(parsed, mask=mask, roles=source.roles or self.options.roles)
        whole = validate(turns, needs_assistant=mask != "none")
        if not any(message.train for message in whole.messages):
            raise RowError("nothing_trained", "no turn of the conversation is to be trained")
        return self.drafter_of(whole).template.prepare(whole)

    def _drafts(
        self, row: int, parsed: Conversation, source: Source, built: BuiltRows
    ) -> list[Draft]:
        conversation, escaped = self.read(parsed, source)
        drafter = self.drafter_of(conversation)
        if conversation.cut:
            texts = [message.content for message in conversation.cut]
            tokens = sum(len(e.input_ids) for e in self.encoder.encode(texts, [[]] * len(texts)))
            detail = f"{len(texts)} turns behind the last trained one were cut off"
            built.events.append(Event(row, "cut", "trailing_turns_removed", detail, tokens))
        for repair in conversation.repairs:
            built.events.append(Event(row, "repaired", repair, REPAIRS[repair]))
        idle = without_effect(conversation, drafter.template.text)
        built.counts.update(f"ignored:{field}" for field in idle)
        if escaped:
            built.counts["escaped_special_tokens"] += escaped
            detail = f"{escaped} control tokens inside message text were broken up"
            built.events.append(Event(row, "repaired", "special_tokens_escaped", detail))
        masks = self.options.mask != "none"
        split = masks and self.options.thinking == "split" and has_reasoning(conversation)
        parts = split_turns(conversation) if split else [(0, conversation)]
        drafts = [drafter.draft(row, part, each) for part, each in parts]
        for draft in drafts if split else ():
            if not draft.trained:
                built.counts.update(draft.counts)
        if masks and not any(draft.trained for draft in drafts):
            if any(draft.masked.stripped for draft in drafts):
                raise RowError(
                    "thinking_stripped",
                    "the template strips the thinking of the turns that are to be trained; "
                    "thinking: preserve keeps it",
                )
            raise RowError("nothing_trained", "no turn of the conversation is to be trained")
        for draft in drafts:
            refuse_unplaced(draft, masks=masks)
        if split:
            drafts = [draft for draft in drafts if draft.trained]
            built.counts["samples_from_split"] += len(drafts) - 1
        roles = source.roles or self.options.roles
        others = sum(bool(m.train) and m.role not in roles for m in parsed.messages)
        if others and masks:
            built.counts["other_turns_switched_on"] += others
        return drafts

    def _compared(
        self, row: int, comparison: Comparison, source: Source, built: BuiltRows
    ) -> list[Draft]:
        """One draft for each conversation of a comparison."""
        drafts = []
        for part, conversation in enumerate(comparison.conversations):
            mine = self._drafts(row, conversation, source, built)
            if len(mine) != 1:
                raise RowError(
                    "compared_in_parts",
                    "data.thinking: split makes several samples of an answer that is compared",
                )
            drafts.append(replace(mine[0], part=part))
        return drafts

    # -- samples -----------------------------------------------------------------------------

    def _keep_conversations(
        self, drafter: Drafter, drafts: Sequence[Draft], built: BuiltRows
    ) -> None:
        for draft, tokens in zip(drafts, drafter.encode(drafts), strict=True):
            try:
                fitted = drafter.fit(draft, tokens)
            except RowError as error:
                trained = int(np.count_nonzero(drafter.sample(draft, tokens)[1]))
                size = len(tokens.input_ids)
                event = Event(draft.row, "dropped", error.reason, error.detail, size, trained)
                built.events.append(event)
                continue
            if fitted.event is not None:
                built.events.append(fitted.event)
            built.counts.update(fitted.counts)
            built.ends.update(fitted.ends)
            built.add(fitted.input_ids, fitted.loss_mask, draft.row, draft.part)

    def _keep_texts(self, texts: Sequence[tuple[int, TextRow]], built: BuiltRows) -> None:
        """Plain text: bos and eos as the tokenizer adds them, and an eos at the end in any case."""
        ends = [0 if row.apart else len(row.text) for _, row in texts]
        whole = [row.prompt + row.text[:end] for (_, row), end in zip(texts, ends, strict=True)]
        starts = [len(row.prompt) for _, row in texts]
        spans = [[(start, start + end)] for start, end in zip(starts, ends, strict=True)]
        encoded = self.encoder.encode(whole, spans, add_special_tokens=True)
        alone = [row.text for _, row in texts if row.apart]
        answers = iter(self.encoder.encode(alone, [[]] * len(alone)))
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        limit = self.options.max_length
        for (row, text), tokens in zip(texts, encoded, strict=True):
            ids, first = tokens.input_ids, tokens.ranges[0][0]
            if text.apart:
                if (
                    eos is not None
                    and self.tokenizer.num_special_tokens_to_add()
                    and ids[-1] == eos
                ):
                    ids = ids[:-1]  # the tokenizer ends texts with it, and this one goes on
                first = len(ids)
                ids = np.concatenate([ids, next(answers).input_ids])
            if bos is not None and len(ids) > 1 and ids[0] == bos == ids[1]:
                # The text has the token that the tokenizer adds: once is enough.
                ids, first = ids[1:], max(first - 1, 0)
                built.counts["double_bos"] += 1
            if eos is not None and (len(ids) == 0 or ids[-1] != eos):
                ids = np.append(ids, np.int32(eos))
            mask = np.ones(len(ids), dtype=np.uint8)
            if text.prompt and self.options.mask != "none":
                mask[:first] = 0
            built.counts["straddling_tokens"] += tokens.num_straddling if text.prompt else 0
            if len(ids) > limit and not text.prompt:
                built.counts["texts_in_pieces"] += 1
                self._keep_pieces(row, ids, built)
                continue
            try:
                if len(ids) > limit:
                    ids, mask, event = cut_tokens(row, ids, mask, self.options)
                    built.events.append(event)
                self._check(row, ids, mask, built)
            except RowError as error:
                size, trained = len(ids), int(np.count_nonzero(mask))
                event = Event(row, "dropped", error.reason, error.detail, size, trained)
                built.events.append(event)

    def _keep_pieces(self, row: int, ids: np.ndarray, built: BuiltRows) -> None:
        """A text longer than a sample becomes several; a last piece of one token joins none."""
        limit = self.options.max_length
        for part, start in enumerate(range(0, len(ids), limit)):
            piece = ids[start : start + limit]
            if len(piece) > 1:
                built.add(piece, np.ones(len(piece), dtype=np.uint8), row, part)
            else:
                detail = "the last piece of a long text is a single token, which predicts nothing"
                built.events.append(Event(row, "cut", "single_token", detail, 1, 0))

    def _keep_tokens(self, row: int, tokens: TokenRow, built: BuiltRows) -> None:
        ids = np.array(tokens.input_ids, dtype=np.int32)
        mask = np.array(tokens.trained, dtype=np.uint8)
        largest = int(ids.max())
        if largest >= self._vocabulary:
            raise RowError(
                "token_out_of_range",
                f"token id {largest}, but the tokenizer has {self._vocabulary} tokens",
            )
        if self.options.mask != "none" and not tokens.is_masked:
            built.counts["tokens_without_mask"] += 1
        if len(ids) > self.options.max_length:
            ids, mask, event = cut_tokens(row, ids, mask, self.options)
            built.events.append(event)
        self._check(row, ids, mask, built)

    def _check(self, row: int, ids: np.ndarray, mask: np.ndarray, built: BuiltRows) -> None:
        if not mask[1:].any():
            raise RowError("nothing_trained", "no token of the row is trained")
        built.add(ids, mask, row, 0)


REPAIRS: Mapping[str, str] = {
    "user_turns_joined": "user turns in a row were joined",
}


def split_turns(conversation: Conversation) -> list[tuple[int, Conversation]]:
    """One conversation for each answer to be trained, where it is the last turn; with its number.

    Another turn that is switched on is trained with the answer behind it.
    """
    messages = conversation.messages
    ends = [turn for turn, message in enumerate(messages, 1) if message.role == "assistant"]
    parts, start = [], 0
    for part, end in enumerate(dict.fromkeys([*ends, len(messages)])):
        before = tuple(replace(message, train=False) for message in messages[:start])
        if any(message.train for message in messages[start:end]):
            parts.append((part, replace(conversation, messages=before + messages[start:end])))
        start = end
    return parts


def refuse_unplaced(draft: Draft, *, masks: bool) -> None:
    """Refuse a row with a turn whose switch cannot act, since its place cannot be told.

    Raises:
        RowError: naming the turn.
    """
    placed = {span.turn for span in draft.masked.spans}
    for turn, message in enumerate(draft.conversation.messages):
        is_sought = message.role != "assistant" and message.train is masks
        if is_sought and turn not in placed and message.content.strip():
            raise RowError(
                "mask_unproved",
                f"turn {turn + 1} ({message.role}): the template prints this text twice, or not as "
                "it is, so it cannot be trained, or left out, by itself",
            )


def has_reasoning(conversation: Conversation) -> bool:
    """Whether an assistant turn thinks, in a field of its own or in its text."""
    return any(
        message.role == "assistant" and (message.reasoning or THINK_CLOSE in message.content)
        for message in conversation.messages
    )
