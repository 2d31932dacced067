"""Rows to samples: decode, parse, render, mask, tokenise, fit to ``max_length``.

One :class:`SampleBuilder` lives in each worker process. It never raises for a bad row: every row
ends as samples, as an entry for the ledger, or as both.
"""

import functools
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from trainkit.data.encode import Encoded, Encoder
from trainkit.data.fields import without_effect
from trainkit.data.files import RawRow
from trainkit.data.formats import decode_row, detect, read_row
from trainkit.data.image_rows import has_images
from trainkit.data.images import REPAIRS, Image
from trainkit.data.masking import EMPTY_THINK, Masked, MaskFinder, Span, find_preserving
from trainkit.data.messages import (
    Comparison,
    Conversation,
    Message,
    ParsedRow,
    RowError,
    TextRow,
    TokenRow,
    switched,
    validate,
)
from trainkit.data.options import DataOptions
from trainkit.data.store import LEFT_OUT, Action, Entry
from trainkit.data.template import THINK_CLOSE, ByVariables, ChatTemplate, refuse_unread
from trainkit.data.vision import LOOSE, NoVision, Vision
from trainkit.errors import DataError, TrainkitError
from trainkit.options import Source


@dataclass(frozen=True)
class Event:
    """A ledger entry with the number of its row in the run, instead of file and line."""

    row: int
    action: Action
    reason: str
    detail: str
    tokens: int = 0
    trained_tokens: int = 0


@dataclass(frozen=True)
class Draft:
    """A rendered conversation.

    Attributes:
        counts: things worth telling, by name.
    """

    row: int
    part: int
    conversation: Conversation
    masked: Masked
    trained: frozenset[int]
    counts: Counter[str]

    @functools.cached_property
    def images(self) -> tuple[Image, ...]:
        return tuple(image for each in self.conversation.messages for image in each.images)


class Drafter:
    """Renders conversations and fits them to ``max_length``."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        options: DataOptions,
        encoder: Encoder,
        vision: Vision | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.options = options
        self.encoder = encoder
        self.vision = vision
        words = frozenset() if vision is None else vision.words
        self.template = ChatTemplate(tokenizer, options, words)
        try:
            self.finder = MaskFinder(self.template)
        except RowError as error:
            raise DataError(
                "no mask can be proved for this chat template, not even on a plain conversation: "
                f"{error.detail}",
                where=str(tokenizer.name_or_path),
                fix="give another template with data.chat_template, or train on everything with "
                "mask: none",
            ) from error

    def draft(self, row: int, part: int, conversation: Conversation) -> Draft:
        """Render a conversation, every turn of which has its switch, and find the trained turns."""
        messages = conversation.messages
        masks = self.options.mask != "none"
        others = frozenset(
            turn
            for turn, message in enumerate(messages)
            if message.role != "assistant" and message.train is masks
        )
        find = self.finder.find
        if self.options.thinking == "preserve":
            find = functools.partial(find_preserving, self.finder)
        masked = find(conversation, others)
        if self.vision is not None:
            wanted = sum(len(message.images) for message in conversation.messages)
            self.vision.refuse_unprinted(masked.text, wanted)
        if self.options.thinking == "empty":
            masked = _with_empty_thoughts(masked, others)
        if self.options.append_eos:
            masked = self._with_eos(masked, others)
        if self.options.train_behind:
            masked = _behind(masked, others, self.options.train_behind)
        if self.options.end_texts == "line_break":
            masked = _with_line_breaks(masked, others)
        counts: Counter[str] = Counter()
        turns = {span.turn for span in masked.spans}
        last = max((n for n, m in enumerate(messages) if m.role == "assistant"), default=-1)
        trained = set()
        for turn in turns | masked.stripped:
            if not messages[turn].train:
                continue
            if masks and turn in masked.stripped:
                counts["turns_with_stripped_thinking"] += 1
                if turn != last or turn not in turns:
                    # Training it would teach to answer without thinking, or to say nothing.
                    counts["turns_not_trained_for_stripped_thinking"] += 1
                    continue
                counts["turns_trained_without_their_thinking"] += 1
            trained.add(turn)
        return Draft(row, part, conversation, masked, frozenset(trained), counts)

    def _with_eos(self, masked: Masked, others: frozenset[int]) -> Masked:
        """The tokenizer's eos behind every answer that has no end-of-turn token."""
        if not masked.spans:
            return masked
        eos = self.eos
        pieces: list[str] = []
        spans: list[Span] = []
        copied = shift = 0
        for span in masked.spans:
            start, end, token = span.start + shift, span.end + shift, span.end_of_turn
            if token is None and span.turn not in others:
                pieces += [masked.text[copied : span.end], eos]
                copied, token = span.end, eos
                shift += len(eos)
                end += len(eos)
            spans.append(replace(span, start=start, end=end, end_of_turn=token))
        if copied < masked.spans[-1].end or not pieces:
            pieces.append(masked.text[copied:])  # else the conversation ends with the eos
        return replace(masked, text="".join(pieces), spans=tuple(spans))

    @functools.cached_property
    def eos(self) -> str:
        eos, index = self.tokenizer.eos_token, self.tokenizer.eos_token_id
        if eos is None or self.template.added.get(str(eos)) != index:
            raise DataError(
                f"the tokenizer has no eos token to append (eos_token: {eos!r})",
                where="data.append_eos",
                fix="set eos_token in its tokenizer_config.json to one of its special tokens",
            )
        return str(eos)

    def encode(self, drafts: Sequence[Draft]) -> list[Encoded]:
        """Tokenise drafts: those without images in one batch."""
        spans = [[(span.start, span.end) for span in draft.masked.spans] for draft in drafts]
        plain = [place for place, draft in enumerate(drafts) if not draft.images]
        texts = [drafts[place].masked.text for place in plain]
        encoded = self.encoder.encode(texts, [spans[place] for place in plain])
        if len(plain) == len(drafts):
            return encoded
        assert self.vision is not None
        found = dict(zip(plain, encoded, strict=True))
        for place, draft in enumerate(drafts):
            if place not in found:
                found[place] = self.vision.encode(
                    self.encoder, draft.masked.text, spans[place], draft.images
                )
        return [found[place] for place in range(len(drafts))]

    def sample(self, draft: Draft, tokens: Encoded) -> tuple[np.ndarray, np.ndarray]:
        """Ids and mask of a whole conversation."""
        ids = tokens.input_ids
        everything = self.options.mask == "none"
        mask = np.full(len(ids), everything, dtype=np.uint8)
        for span, (first, last) in zip(draft.masked.spans, tokens.ranges, strict=True):
            if (span.turn in draft.trained) != everything:
                mask[first:last] = not everything
        spared = self.options.images.mask
        if tokens.images and self.vision is not None and spared != "none":
            for first, last in tokens.images if spared == "frame" else ():
                mask[first:last] = 0
            seen = self.vision.frame if spared == "frame" else [self.vision.token_id]
            mask[np.isin(ids, seen)] = 0
        return ids, mask

    def fewer_turns(
        self, draft: Draft, tokens: Encoded
    ) -> tuple[Draft, Encoded, np.ndarray, np.ndarray] | None:
        """The most turns that fit, rendered again: templates treat the last turn in its own way."""
        messages = draft.conversation.messages
        limit, masks = self.options.max_length, self.options.mask != "none"
        choices: list[tuple[Message, ...]] = []
        if self.options.truncation == "drop_turns":
            spans = zip(draft.masked.spans, tokens.ranges, strict=True)
            fitting = [
                span.turn
                for span, (_, end) in spans
                if end <= limit and (messages[span.turn].role == "assistant" or masks)
            ]
            choices = [messages[: turn + 1] for turn in reversed(fitting)]
        elif self.options.truncation == "left_turns":
            head = 0
            while head < len(messages) and messages[head].role in ("system", "developer"):
                head += 1
            users = [i for i, m in enumerate(messages) if m.role == "user" and i > head]
            choices = [messages[:head] + messages[start:] for start in users]
        for choice in choices:
            if len(choice) == len(messages) or not any(message.train for message in choice):
                continue
            conversation = replace(draft.conversation, messages=choice)
            try:
                shorter = self.draft(draft.row, draft.part, conversation)
            except RowError:
                continue
            (encoded,) = self.encode([shorter])
            ids, mask = self.sample(shorter, encoded)
            end = whole_images(encoded.images, limit)
            if len(ids) > limit and not mask[end:].any():
                ids, mask = ids[:end], mask[:end]
            if len(ids) <= limit and mask[1:].any():
                return shorter, encoded, ids, mask
        return None


def whole_images(places: Sequence[tuple[int, int]], limit: int) -> int:
    """Where a sample is cut to have ``limit`` tokens at most: never inside an image."""
    return min((first for first, last in places if first < limit < last), default=limit)


def entry_of(event: Event, rows: Sequence[RawRow], path: Path, options: DataOptions) -> Entry:
    line = rows[event.row].line
    if event.reason == "too_long" and options.truncation == "error":
        raise DataError(
            f"the row has {event.detail}",
            where=f"{path}:{line}",
            fix="raise data.max_length, or choose another data.truncation",
        )
    details = (event.action, event.reason, event.detail, event.tokens, event.trained_tokens)
    return Entry(str(path), line, *details)


class Sample(NamedTuple):
    """One sample: of which row of the run, and which of that row's samples it is."""

    row: int
    part: int
    input_ids: np.ndarray
    loss_mask: np.ndarray
    images: tuple[Image, ...] = ()


@dataclass
class BuiltRows:
    """What became of a run of rows.

    Attributes:
        counts: formats (``format:<name>``) and things worth telling, by name.
        ends: end-of-turn tokens that are trained, and how many turns each ends.
        notes: what a person should know about the template.
        unread: files of images that could not be read, or are not there.
    """

    samples: list[Sample] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    notes: set[str] = field(default_factory=set)
    unread: set[str] = field(default_factory=set)

    @property
    def num_kept(self) -> int:
        return len({sample.row for sample in self.samples})

    @property
    def num_left_out(self) -> int:
        """Rows that the recipe has no use for, with nothing wrong in them."""
        return len({e.row for e in self.events if e.action == "dropped" and e.reason in LEFT_OUT})

    def drop(self, row: int, error: RowError, mask: np.ndarray | None = None) -> None:
        lost = (0, 0) if mask is None else (len(mask), int(np.count_nonzero(mask)))
        self.events.append(Event(row, "dropped", error.reason, error.detail, *lost))


class SampleBuilder:
    """Builds samples for one tokenizer and one set of options.

    Without ``vision`` rows with images are refused, as those of a model of text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        options: DataOptions,
        vision: Vision | NoVision | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.options = options
        self.encoder = Encoder(tokenizer)
        self.no_vision = vision if isinstance(vision, NoVision) else None
        self.vision = seen = vision if isinstance(vision, Vision) else None
        self._drafters = ByVariables(
            tokenizer, options, lambda own: Drafter(tokenizer, own, self.encoder, seen)
        )
        self._vocabulary = len(tokenizer)
        self._is_checked = False

    def drafter_of(self, conversation: Conversation) -> Drafter:
        """The chat template at work on a conversation, which may have variables of its own."""
        if not self._is_checked:
            refuse_unread(self.tokenizer, self.options)
            self._is_checked = True
        try:
            return self._drafters.of(conversation)
        except TrainkitError as error:
            if not self._drafters.has_own(conversation):
                raise
            own = dict(conversation.template_kwargs)
            reason = "template_kwargs" if own else "tool_template"
            detail = f"with {json.dumps(own)[:200] if own else 'tools'}: {error.what}"
            raise RowError(reason, detail) from error

    def build(self, rows: Sequence[RawRow], source: Source, folder: Path = Path()) -> BuiltRows:
        """Turn rows into samples.

        Relative paths of images start at ``folder``, that of the file.
        """
        built = BuiltRows()
        drafts: dict[Drafter, list[Draft]] = {}
        texts: list[tuple[int, int, TextRow]] = []
        num_compared: dict[int, int] = {}
        for number, row in enumerate(rows):
            try:
                parsed = self._parse(row, source, built)
                if isinstance(parsed, TokenRow):
                    self._keep_tokens(number, parsed, built)
                    continue
                is_compared = isinstance(parsed, Comparison)
                each_row = parsed.conversations if isinstance(parsed, Comparison) else (parsed,)
                if is_compared:
                    num_compared[number] = len(each_row)
                first = parsed.first if isinstance(parsed, Comparison) else 0
                for part, each in enumerate(each_row, first):
                    if isinstance(each, TextRow):
                        texts.append((number, part, each))
                        continue
                    mine = self._drafts(number, each, source, folder, built)
                    if is_compared and len(mine) != 1:
                        raise RowError(
                            "compared_in_parts",
                            "data.thinking: split makes several samples of an answer that is "
                            "compared",
                        )
                    mine = [replace(mine[0], part=part)] if is_compared else mine
                    drafts.setdefault(self.drafter_of(each), []).extend(mine)
            except RowError as error:
                built.drop(number, error)
                built.unread.update(getattr(error, "paths", ()))
        for drafter, mine in drafts.items():
            self._keep_conversations(drafter, mine, built, num_compared.keys())
        if texts:
            self._keep_texts(texts, built)
        found = Counter(sample.row for sample in built.samples)
        lost = {row for row, count in num_compared.items() if found[row] < count}
        built.samples = [sample for sample in built.samples if sample.row not in lost]
        size = self.options.num_embeddings or self._vocabulary
        for number, _, ids, *_ in built.samples if self._vocabulary > size else ():
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
        kept = {sample.row for sample in built.samples}
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
        return built

    # -- rows -----------------------------------------------------------------------------------

    def _parse(self, raw: RawRow, source: Source, built: BuiltRows) -> ParsedRow:
        row = decode_row(raw)
        try:
            if self.no_vision is not None and has_images(row):
                raise self.no_vision.error(f"{source.path}:{raw.line}")
            seen = self.vision
            parsed = read_row(
                row,
                source.format,
                source.columns,
                images=seen is not None,
                known=() if seen is None else seen.words,
            )
        except DataError as error:  # a template that does not end
            place = f"{source.path}, line {raw.line}: {error.where}"
            raise DataError(error.what, where=place, fix=error.fix) from error
        name: str = source.format
        if name == "auto":
            name = (detect(row) if isinstance(row, Mapping) else None) or "messages"
        built.counts[f"format:{name}"] += 1
        built.counts.update(f"ignored:{field}" for field in parsed.ignored)
        return parsed

    def read(
        self, parsed: Conversation, source: Source, folder: Path
    ) -> tuple[Conversation, int, Counter[str]]:
        """A conversation as it is rendered, with a switch on every turn.

        Returns:
            it, how many control tokens in its texts were broken up, and what was repaired of its
            images.
        """
        mask = self.options.mask
        turns = switched(parsed, mask=mask, roles=source.roles or self.options.roles)
        whole = validate(turns, needs_assistant=mask != "none")
        if not any(message.train for message in whole.messages):
            raise RowError("nothing_trained", "no turn of the conversation is to be trained")
        repairs: Counter[str] = Counter()
        if self.vision is not None and any(message.images for message in whole.messages):
            whole, repairs = self.vision.load_all(whole, folder, self.options.images)
        return *self.drafter_of(whole).template.prepare(whole), repairs

    def _drafts(
        self, row: int, parsed: Conversation, source: Source, folder: Path, built: BuiltRows
    ) -> list[Draft]:
        conversation, escaped, repairs = self.read(parsed, source, folder)
        for repair, count in sorted(repairs.items()):
            built.counts[repair] += count
            detail = f"{count} images: {REPAIRS[repair]}"
            built.events.append(Event(row, "repaired", repair, detail))
        drafter = self.drafter_of(conversation)
        if conversation.cut:
            texts = [message.content for message in conversation.cut]
            tokens = sum(len(e.input_ids) for e in self.encoder.encode(texts, [[]] * len(texts)))
            detail = f"{len(texts)} turns behind the last trained one were cut off"
            built.events.append(Event(row, "cut", "trailing_turns_removed", detail, tokens))
        for repair in conversation.repairs:
            built.events.append(Event(row, "repaired", repair, "user turns in a row were joined"))
        idle = without_effect(conversation, drafter.template.text)
        built.counts.update(f"ignored:{field}" for field in idle)
        if escaped:
            built.counts["escaped_special_tokens"] += escaped
            detail = f"{escaped} control tokens inside message text were broken up"
            built.events.append(Event(row, "repaired", "special_tokens_escaped", detail))
        masks = self.options.mask != "none"
        split = (
            masks
            and self.options.thinking == "split"
            and any(
                m.role == "assistant" and (m.reasoning or THINK_CLOSE in m.content)
                for m in conversation.messages
            )
        )
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

    # -- samples -----------------------------------------------------------------------------

    def _keep_conversations(
        self, drafter: Drafter, drafts: Sequence[Draft], built: BuiltRows, compared: Collection[int]
    ) -> None:
        bos, limit = self.tokenizer.bos_token_id, self.options.max_length
        for whole, encoded in zip(drafts, drafter.encode(drafts), strict=True):
            draft, tokens = whole, encoded
            ids, mask = drafter.sample(draft, tokens)
            if draft.images and self.vision is not None:
                self.vision.check(draft.masked.text, draft.images, ids)
            if bos is not None and len(ids) > 1 and ids[0] == bos and ids[1] == bos:
                detail = "the rendering starts with two bos tokens"
                built.drop(draft.row, RowError("double_bos", detail), mask)
                continue
            size, num, shorter = len(ids), int(np.count_nonzero(mask)), None
            # Answers that are compared must keep the same prompt.
            if size > limit and mask[limit:].any() and draft.row not in compared:
                shorter = drafter.fewer_turns(draft, tokens)
            if shorter is not None:
                draft, tokens, ids, mask = shorter
                dropped = len(whole.conversation.messages) - len(draft.conversation.messages)
                detail = f"{size} tokens, at most {limit}; {dropped} turns dropped"
                lost = size - len(ids), num - int(np.count_nonzero(mask))
                built.events.append(Event(draft.row, "cut", "turns_dropped", detail, *lost))
            places = dict(zip(tokens.images, draft.images, strict=True))
            kept = self._keep(draft.row, draft.part, ids, mask, built, places)
            if kept is None:
                continue
            built.counts.update(draft.counts)
            if self.options.mask != "none":
                built.counts["straddling_tokens"] += tokens.num_straddling
            for span, (_, last) in zip(draft.masked.spans, tokens.ranges, strict=True):
                if span.turn not in draft.trained or last > len(kept) or not kept[last - 1]:
                    continue
                if span.end_of_turn is not None:
                    built.ends[span.end_of_turn] += 1
                else:
                    built.counts["turns_without_end"] += 1

    def _keep(
        self,
        row: int,
        part: int,
        ids: np.ndarray,
        mask: np.ndarray,
        built: BuiltRows,
        images: Mapping[tuple[int, int], Image] | None = None,
    ) -> np.ndarray | None:
        """Add a sample, cut to ``max_length`` by the policy, and say its mask; or drop it."""
        whole, limit, policy = mask, self.options.max_length, self.options.truncation
        images = images or {}
        try:
            if len(ids) < self.options.min_length:
                detail = f"{len(ids)} tokens, at least {self.options.min_length}"
                raise RowError("too_short", detail)
            if len(ids) > limit:
                detail, reason = f"{len(ids)} tokens, at most {limit}", "cut_right"
                if images:
                    detail += f", {sum(last - first for first, last in images)} of them images'"
                    limit = whole_images([*images], limit)
                if not mask[limit:].any() and mask[1:limit].any():
                    reason = "untrained_tail"
                elif policy in ("drop", "error"):
                    raise RowError("too_long", detail)
                elif policy != "right":
                    raise RowError("too_long", f"{detail}, and no whole exchange fits")
                lost = len(ids) - limit, int(np.count_nonzero(mask[limit:]))
                built.events.append(Event(row, "cut", reason, detail, *lost))
                ids, mask = ids[:limit], mask[:limit]
            if not mask[1:].any():
                raise RowError("nothing_trained", "no token of the row is trained")
            inside = tuple(
                image._replace(expansion=None)
                for (_, last), image in images.items()
                if last <= len(ids)
            )
            if self.vision is not None:
                self.vision.refuse_loose(ids, inside)
        except RowError as error:
            built.drop(row, error, whole)
            return None
        built.samples.append(Sample(row, part, ids, mask, inside))
        return mask

    def _keep_texts(self, texts: Sequence[tuple[int, int, TextRow]], built: BuiltRows) -> None:
        """Plain text: bos and eos as the tokenizer adds them, and an eos at the end."""
        ends = [0 if row.apart else len(row.text) for _, _, row in texts]
        whole = [row.prompt + row.text[:end] for (_, _, row), end in zip(texts, ends, strict=True)]
        starts = [len(row.prompt) for _, _, row in texts]
        spans = [[(start, start + end)] for start, end in zip(starts, ends, strict=True)]
        encoded = self.encoder.encode(whole, spans, add_special_tokens=True)
        alone = [row.text for _, _, row in texts if row.apart]
        answers = iter(self.encoder.encode(alone, [[]] * len(alone)))
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        limit = self.options.max_length
        for (row, part, text), tokens in zip(texts, encoded, strict=True):
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
            wants_end = self.options.end_texts is True and eos is not None
            if wants_end and (len(ids) == 0 or ids[-1] != eos):
                ids = np.append(ids, np.int32(eos))
            if self.vision is not None and self.vision.token_id in ids:
                built.drop(row, RowError("image_placeholder", LOOSE))
                continue
            mask = np.ones(len(ids), dtype=np.uint8)
            if text.prompt and self.options.mask != "none":
                mask[:first] = 0
            built.counts["straddling_tokens"] += tokens.num_straddling if text.prompt else 0
            if len(ids) > limit and not text.prompt:
                built.counts["texts_in_pieces"] += 1
                pieces = [ids[at : at + limit] for at in range(0, len(ids), limit)]
                if len(pieces[-1]) == 1:
                    what = "the last piece of a long text is a single token, which predicts nothing"
                    built.events.append(Event(row, "cut", "single_token", what, 1, 0))
                    pieces.pop()
                ones = np.ones(limit, dtype=np.uint8)
                built.samples += [
                    Sample(row, place, piece, ones[: len(piece)])
                    for place, piece in enumerate(pieces)
                ]
                continue
            self._keep(row, part, ids, mask, built)

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
        self._keep(row, 0, ids, mask, built)


def _with_empty_thoughts(masked: Masked, others: frozenset[int]) -> Masked:
    """Answers that begin at the empty thought before them, whoever printed it."""
    spans = []
    for span in masked.spans:
        found = [masked.text.rfind(mark, 0, span.start) for mark in ("<think>", "<|channel>")]
        is_empty = EMPTY_THINK.fullmatch(masked.text[max(*found, 0) : span.start].rstrip())
        is_one = is_empty and span.turn not in others
        spans.append(replace(span, start=max(found)) if is_one else span)
    return replace(masked, spans=tuple(spans))


def _behind(masked: Masked, others: frozenset[int], mark: str) -> Masked:
    """Answers that train behind a text in them; those without it are no spans."""
    spans = []
    for span in masked.spans:
        place = masked.text.rfind(mark, span.start, span.end)
        if span.turn in others:
            spans.append(span)
        elif place >= 0:
            spans.append(replace(span, start=place + len(mark)))
    return replace(masked, spans=tuple(spans))


def _with_line_breaks(masked: Masked, others: frozenset[int]) -> Masked:
    spans = [
        span
        if span.turn in others
        else replace(span, end=span.end + masked.text.startswith("\n", span.end))
        for span in masked.spans
    ]
    return replace(masked, spans=tuple(spans))


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
    """Refuse a row with a turn whose switch cannot act, since its place cannot be told."""
    placed = {span.turn for span in draft.masked.spans}
    for turn, message in enumerate(draft.conversation.messages):
        is_sought = message.role != "assistant" and message.train is masks
        if is_sought and turn not in placed and message.content.strip():
            raise RowError(
                "mask_unproved",
                f"turn {turn + 1} ({message.role}): the template prints this text twice, or not as "
                "it is, so it cannot be trained, or left out, by itself",
            )
