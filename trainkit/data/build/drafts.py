"""Rendered conversations on their way to samples: which turns are trained, and what fits."""

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from trainkit.data.build.ledger import Action
from trainkit.data.options import DataOptions
from trainkit.data.read.messages import Conversation, Message, RowError
from trainkit.data.render.encode import Encoded, Encoder
from trainkit.data.render.masking import MaskFinder
from trainkit.data.render.preserve import find_preserving
from trainkit.data.render.spans import Masked, Span
from trainkit.data.render.template import ChatTemplate
from trainkit.errors import DataError


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
        row, part: which row of the run it came from, and which sample of that row it is.
        conversation: as rendered, with a switch on every turn.
        masked: its text and spans.
        trained: turns that are trained.
        counts: things worth telling, by name.
    """

    row: int
    part: int
    conversation: Conversation
    masked: Masked
    trained: frozenset[int]
    counts: Counter[str]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The characters of all turns that were looked for."""
        return [(span.start, span.end) for span in self.masked.spans]


@dataclass(frozen=True)
class Fitted:
    """A finished sample.

    Attributes:
        input_ids: (S,) int32.
        loss_mask: (S,) uint8.
        event: what was cut, or None.
        counts: things worth telling, by name.
        ends: end-of-turn tokens that are trained, and how many turns each ends.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    event: Event | None = None
    counts: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)


class Drafter:
    """Renders conversations and fits them to ``max_length``.

    Args:
        tokenizer: with a chat template.
        options: the mask, thinking and truncation policies are read.
        encoder: of the tokenizer.

    Raises:
        DataError: the template's masks cannot be proved even on a plain conversation.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, options: DataOptions, encoder: Encoder
    ) -> None:
        self.tokenizer = tokenizer
        self.options = options
        self.encoder = encoder
        self.template = ChatTemplate(tokenizer, options)
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
        """Render a conversation, every turn of which has its switch, and find the trained turns.

        Raises:
            RowError: it cannot be rendered or masked.
        """
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
        if self.options.append_eos:
            masked = self._with_eos(masked, others)
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
        """The eos as text.

        Raises:
            DataError: there is none, or the tokenizer does not read it back as one token.
        """
        eos, index = self.tokenizer.eos_token, self.tokenizer.eos_token_id
        if eos is None or self.template.added.get(str(eos)) != index:
            raise DataError(
                f"the tokenizer has no eos token to append (eos_token: {eos!r})",
                where="data.append_eos",
                fix="set eos_token in its tokenizer_config.json to one of its special tokens",
            )
        return str(eos)

    def encode(self, drafts: Sequence[Draft]) -> list[Encoded]:
        """Tokenise drafts in one batch."""
        return self.encoder.encode(
            [draft.masked.text for draft in drafts], [draft.spans for draft in drafts]
        )

    def sample(self, draft: Draft, tokens: Encoded) -> tuple[np.ndarray, np.ndarray]:
        """Ids and mask of a whole conversation."""
        ids = tokens.input_ids
        everything = self.options.mask == "none"
        mask = np.full(len(ids), everything, dtype=np.uint8)
        for span, (first, last) in zip(draft.masked.spans, tokens.ranges, strict=True):
            if (span.turn in draft.trained) != everything:
                mask[first:last] = not everything
        return ids, mask

    def fit(self, draft: Draft, tokens: Encoded) -> Fitted:
        """Make the sample of a draft, cut to ``max_length`` by the truncation policy.

        Raises:
            RowError: nothing of it can be trained.
            DataError: it is too long and the policy is ``error``.
        """
        ids, mask = self.sample(draft, tokens)
        bos = self.tokenizer.bos_token_id
        if bos is not None and len(ids) > 1 and ids[0] == bos and ids[1] == bos:
            raise RowError("double_bos", "the rendering starts with two bos tokens")
        event = None
        if len(ids) > self.options.max_length:
            limit = self.options.max_length
            whole = (len(ids), int(np.count_nonzero(mask)))
            needless = not mask[limit:].any()
            shorter = None if needless else self._fewer_turns(draft, tokens)
            if shorter is None:
                ids, mask, event = cut_tokens(draft.row, ids, mask, self.options)
            else:
                dropped = len(draft.conversation.messages)
                draft, tokens, ids, mask = shorter
                dropped -= len(draft.conversation.messages)
                event = Event(
                    draft.row,
                    "cut",
                    "turns_dropped",
                    f"{whole[0]} tokens, at most {limit}; {dropped} turns dropped",
                    whole[0] - len(ids),
                    whole[1] - int(np.count_nonzero(mask)),
                )
        if not mask[1:].any():
            raise RowError("nothing_trained", "no token of the row is trained")
        return Fitted(ids, mask, event, *self._account(draft, tokens, ids, mask))

    def _account(
        self, draft: Draft, tokens: Encoded, ids: np.ndarray, mask: np.ndarray
    ) -> tuple[Counter[str], Counter[str]]:
        counts = Counter(draft.counts)
        if self.options.mask != "none":
            counts["straddling_tokens"] += tokens.num_straddling
        ends: Counter[str] = Counter()
        for span, (_, last) in zip(draft.masked.spans, tokens.ranges, strict=True):
            if span.turn not in draft.trained or last > len(ids) or not mask[last - 1]:
                continue
            if span.end_of_turn is not None:
                ends[span.end_of_turn] += 1
            else:
                counts["turns_without_end"] += 1
        return counts, ends

    def _fewer_turns(
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
            if len(ids) > limit and not mask[limit:].any():
                ids, mask = ids[:limit], mask[:limit]
            if len(ids) <= limit and mask[1:].any():
                return shorter, encoded, ids, mask
        return None


def cut_tokens(
    row: int, ids: np.ndarray, mask: np.ndarray, options: DataOptions
) -> tuple[np.ndarray, np.ndarray, Event]:
    """Cut a sample that is too long, where the policy or the mask allows it.

    Raises:
        RowError: the row is to be dropped instead; with the policy ``error`` that stops the run.
    """
    limit = options.max_length
    too_long = f"{len(ids)} tokens, at most {limit}"
    if not mask[limit:].any() and mask[1:limit].any():
        reason = "untrained_tail"
    elif options.truncation == "right":
        reason = "cut_right"
    elif options.truncation in ("drop", "error"):
        raise RowError("too_long", too_long)
    else:
        raise RowError("too_long", f"{too_long}, and no whole exchange fits")
    lost = int(np.count_nonzero(mask[limit:]))
    event = Event(row, "cut", reason, too_long, len(ids) - limit, lost)
    return ids[:limit], mask[:limit], event
