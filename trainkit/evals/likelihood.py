"""How likely a model finds continuations of contexts: few batches, little padding, few logits.

The harness's own way computes logits at every position and their softmax over the vocabulary; only
those of the continuations are read. Here the output layer sees no other positions, rows of like
length share a batch, a context is computed once for all its answers of one token, and a beginning
that many rows share (the examples before each question) is computed once as well.
"""

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from trainkit.errors import ModelError

logger = logging.getLogger(__name__)

GPU_TOKENS, CPU_TOKENS = 32768, 4096
"""Tokens of a batch, padding included, unless memory runs out: then it is halved."""

_LOGIT_BYTES = 2**30
_SHORTEST_BEGINNING = 64
_FEWEST_SAVED = 8192


Ids = tuple[int, ...]
Pair = tuple[Ids, Ids]
"""A context and its continuation; neither is empty."""
Likelihood = tuple[float, bool]
"""The log of a continuation's probability, and whether greedy decoding would write it."""


@dataclass
class _Row:
    """What the model computes once.

    Attributes:
        context: what its answers follow.
        head: what they begin with, all but the last token; nothing for answers of one token.
        pairs: (place of the pair, its continuation): the head and one more token, or one token.
    """

    context: Ids
    head: Ids
    pairs: list[tuple[int, Ids]] = field(default_factory=list)

    @property
    def tokens(self) -> Ids:
        return self.context + self.head


class Scorer:
    """Scores pairs with a causal language model, in evaluation mode and without gradients.

    Inputs longer than ``max_length`` lose their beginning; without ``batch_size`` batches go by
    tokens.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_length: int,
        pad_id: int,
        batch_size: int | None = None,
        shares_beginnings: bool = True,
    ) -> None:
        self._model = model
        self._max_length = max_length
        self._pad_id = pad_id
        self._batch_size = batch_size
        self._device = model.device
        self._budget = GPU_TOKENS if self._device.type == "cuda" else CPU_TOKENS
        self._shares = shares_beginnings and _has_plain_cache(model.config)
        self.num_truncated = 0

    @torch.no_grad()
    def score(self, pairs: Sequence[Pair]) -> list[Likelihood]:
        found: dict[int, Likelihood] = {}
        for beginning, group in self._groups(self._rows(pairs)):
            found.update(self._scored(group, beginning))
        return [found[place] for place in range(len(pairs))]

    def _rows(self, pairs: Sequence[Pair]) -> list[_Row]:
        """Pairs that are read behind the same tokens in one row each."""
        rows: dict[Pair, _Row] = {}
        longer: dict[Ids, _Row] = {}
        for place, (context, continuation) in enumerate(pairs):
            if len(continuation) > self._max_length:
                raise ModelError(
                    f"an answer has {len(continuation)} tokens; the model's context holds "
                    f"{self._max_length}"
                )
            room = self._max_length + 1 - len(continuation)
            self.num_truncated += len(context) > room
            key = context[-room:], continuation[:-1]
            row = rows.setdefault(key, _Row(*key))
            row.pairs.append((place, continuation))
            if row.head:
                longer.setdefault(row.context, row)
        for context, head in list(rows):
            if not head and context in longer:
                longer[context].pairs += rows.pop((context, head)).pairs
        return list(rows.values())

    # -- what rows share --------------------------------------------------------------------------

    def _groups(self, rows: list[_Row]) -> Iterator[tuple[Ids, list[_Row]]]:
        """Rows with what they begin with, where that is worth computing apart."""
        if not self._shares:
            yield (), rows
            return
        alone: list[_Row] = []
        ordered = sorted(rows, key=lambda row: row.tokens)
        start = 0
        while start < len(ordered):
            end, length = _shared(ordered, start)
            group = ordered[start:end]
            length = min(length, *(len(row.context) - 1 for row in group))
            if length >= _SHORTEST_BEGINNING and (len(group) - 1) * length >= _FEWEST_SAVED:
                yield group[0].tokens[:length], group
            else:
                alone += group
            start = end
        if alone:
            yield (), alone

    # -- batches ----------------------------------------------------------------------------------

    def _scored(self, rows: list[_Row], beginning: Ids) -> Iterator[tuple[int, Likelihood]]:
        """Every pair of the rows; a batch that does not fit is tried again in halves."""
        cache = None
        if beginning:
            ids = torch.tensor([beginning], device=self._device)
            with _only_read(self._model, [(0, len(beginning) - 1)]):
                cache = self._model(input_ids=ids, use_cache=True).past_key_values
        waiting = sorted(rows, key=lambda row: len(row.tokens), reverse=True)
        finished: list[tuple[list[int], torch.Tensor]] = []
        while waiting:
            count = self._fitting(waiting)
            try:
                finished.append(self._batch(waiting[:count], len(beginning), cache))
            except torch.OutOfMemoryError:
                if count == 1:
                    raise
                torch.cuda.empty_cache()
                self._budget = max(self._budget // 2, len(waiting[0].tokens))
                logger.warning("memory is short: batches of %d tokens from here", self._budget)
                continue
            waiting = waiting[count:]
        # Read at the end: until here the device works without a wait.
        for places, values in finished:
            for place, (log_probability, is_greedy) in zip(places, values.tolist(), strict=True):
                yield place, (log_probability, bool(is_greedy))

    def _fitting(self, rows: Sequence[_Row]) -> int:
        """How many rows, the longest first, make a batch."""
        vocabulary = self._model.config.get_text_config().vocab_size
        by_tokens = self._budget // max(len(rows[0].tokens), 1)
        read = accumulate(len(row.head) + 1 for row in rows[:by_tokens])
        by_logits = sum(4 * vocabulary * each <= _LOGIT_BYTES for each in read)
        count = max(min(by_tokens, by_logits), 1)
        return min(count, self._batch_size) if self._batch_size is not None else count

    def _batch(
        self, rows: Sequence[_Row], skipped: int, cache: Any
    ) -> tuple[list[int], torch.Tensor]:
        """(N,) places and (N, 2) log-probabilities and whether they are greedy, on the device."""
        width = len(rows[0].tokens) - skipped
        ids = torch.full((len(rows), width), self._pad_id)
        read: list[tuple[int, int]] = []
        places: list[int] = []
        owners: list[int] = []
        targets: list[int] = []
        offsets: list[int] = []
        for number, row in enumerate(rows):
            own = row.tokens[skipped:]
            ids[number, : len(own)] = torch.tensor(own)
            # Read is a row from the last token of its context to its end.
            first = len(read)
            read += [(number, at) for at in range(len(own) - len(row.head) - 1, len(own))]
            for place, continuation in row.pairs:
                offsets += range(first, first + len(continuation))
                owners += [len(places)] * len(continuation)
                targets += continuation
                places.append(place)
        extra: dict[str, Any] = {}
        if cache is not None:
            own_cache = copy.deepcopy(cache)
            own_cache.batch_repeat_interleave(len(rows))
            extra["past_key_values"] = own_cache
        with _only_read(self._model, read):
            # Padding comes after what is read, and a causal model does not look ahead.
            output = self._model(
                input_ids=ids.to(self._device), use_cache=cache is not None, **extra
            )
        logits = output.logits
        if logits.shape[1] != len(read):  # the output layer was not called as a module
            rows_read, at = zip(*read, strict=True)
            logits = logits[list(rows_read), list(at)][None]
        chosen, owner, target = torch.tensor([offsets, owners, targets], device=self._device)
        wide = logits[0].float()
        logs = wide[chosen, target] - torch.logsumexp(wide, dim=-1)[chosen]
        misses = (wide.argmax(dim=-1)[chosen] != target).float()
        sums = torch.zeros(len(places), 2, device=self._device)
        sums.index_add_(0, owner, torch.stack((logs, misses), dim=1))
        return places, torch.stack((sums[:, 0], (sums[:, 1] == 0).float()), dim=1)


@contextmanager
def _only_read(model: Any, read: Sequence[tuple[int, int]]) -> Iterator[None]:
    """Within, the output layer gets the hidden states that are read, (1, N, H), and no others."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Module):
        yield
        return
    rows = torch.tensor([row for row, _ in read])
    places = torch.tensor([place for _, place in read])

    def choose(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        del module
        hidden = inputs[0]
        return (hidden[rows.to(hidden.device), places.to(hidden.device)][None], *inputs[1:])

    handle = head.register_forward_pre_hook(choose)
    try:
        yield
    finally:
        handle.remove()


def _shared(rows: Sequence[_Row], start: int) -> tuple[int, int]:
    """Where a group of sorted rows ends, and how many tokens all of it begins with."""
    if start + 1 == len(rows):
        return start + 1, 0
    length = _common(rows[start].tokens, rows[start + 1].tokens)
    shortest = max(_SHORTEST_BEGINNING, length // 2)
    end = start + 2
    while end < len(rows):
        common = min(length, _common(rows[end - 1].tokens, rows[end].tokens))
        if common < shortest:
            break
        length, end = common, end + 1
    return end, length


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))


def _has_plain_cache(config: Any) -> bool:
    """Whether all layers attend to all that came before, so that a cache is keys and values."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ()
    window = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    is_mixed = any(hasattr(text, name) for name in ("layers_block_type", "attention_chunk_size"))
    attends = hasattr(text, "num_attention_heads") and not is_mixed
    return attends and not window and all(kind == "full_attention" for kind in kinds)
