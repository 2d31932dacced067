"""Samples to batches. The only file of this package that knows torch.

Shapes: B rows, S tokens per row.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from trainkit.data.vision import Vision
from trainkit.options.data import IGNORE_INDEX

__all__ = ["ImageCollator", "PackingCollator", "PaddingCollator"]

LONGEST_PADDED = 1 << 17
"""Beyond it rows are only as long as what is in them: an absurd ``max_length`` costs nothing."""

_STEP = 64

Sample = Mapping[str, Any]
"""``input_ids`` (S,) int32, ``loss_mask`` (S,) uint8, ``source`` int, ``id`` for messages."""


def _labels(sample: Sample) -> np.ndarray:
    """Unshifted labels; the first is never predicted, so no document continues another."""
    labels = np.where(sample["loss_mask"] != 0, sample["input_ids"], IGNORE_INDEX)
    labels[0] = IGNORE_INDEX
    return labels


class PackingCollator:
    """Rows of several samples each, for attention that respects sequence boundaries.

    Args:
        pad_to: S, the length of every row; beyond ``LONGEST_PADDED`` only what a batch fills.
        pad_token_id: fills the tail of a row.
        with_source: add ``source_ids``.
        pad_to_multiple_of: rounds S up where it is not ``pad_to``.

    Returns from a call:
        ``input_ids``, ``labels``, ``position_ids`` (B, S) int64. Positions start at 0 in every
        sample and in the padded tail. There is no ``attention_mask``: boundaries are in
        ``cu_seq_lens_q`` and ``cu_seq_lens_k`` (int32, over the B * S flattened tokens; samples,
        row ends and tails are all boundaries) with ``max_length_q`` and ``max_length_k`` (int).
        With ``with_source`` also ``source_ids`` (B, S) int64, -1 in the tail.

        A sample that comes without its ``shared`` first tokens, which are those of the one before
        it, attends to them there: then ``shared_keys`` are the tokens that all attend to, one
        sample after the other, and ``cu_seq_lens_k`` bounds in these.
    """

    def __init__(
        self,
        pad_to: int,
        pad_token_id: int,
        *,
        with_source: bool = False,
        pad_to_multiple_of: int = 1,
    ) -> None:
        self._step = math.lcm(_STEP, pad_to_multiple_of)
        self.pad_to = pad_to
        self.pad_token_id = pad_token_id
        self.with_source = with_source

    def __call__(self, rows: Sequence[Sequence[Sample]]) -> dict[str, Any]:
        longest = max(sum(len(sample["input_ids"]) for sample in samples) for samples in rows)
        if longest > self.pad_to:
            raise ValueError(f"a packed row of more than {self.pad_to} tokens")
        filled = -(-max(longest, 1) // self._step) * self._step
        size = self.pad_to if self.pad_to <= LONGEST_PADDED else min(self.pad_to, filled)
        shape = (len(rows), size)
        input_ids = np.full(shape, self.pad_token_id, dtype=np.int64)
        labels = np.full(shape, IGNORE_INDEX, dtype=np.int64)
        position_ids = np.zeros(shape, dtype=np.int64)
        source_ids = np.full(shape, -1, dtype=np.int64)
        segment_lengths: list[int] = []
        shared: dict[int, int] = {}  # by segment
        for row, samples in enumerate(rows):
            start = 0
            for sample in samples:
                length = len(sample["input_ids"])
                end = start + length
                input_ids[row, start:end] = sample["input_ids"]
                labels[row, start:end] = _labels(sample)
                if first := sample.get("shared", 0):
                    shared[len(segment_lengths)] = first
                position_ids[row, start:end] = np.arange(first, first + length)
                source_ids[row, start:end] = sample["source"]
                segment_lengths.append(length)
                start = end
            if start < size:
                position_ids[row, start:] = np.arange(size - start)
                segment_lengths.append(size - start)
        boundaries = np.concatenate([[0], np.cumsum(segment_lengths)]).astype(np.int32)
        longest = max(segment_lengths)
        batch: dict[str, Any] = {
            "input_ids": torch.from_numpy(input_ids),
            "labels": torch.from_numpy(labels),
            "position_ids": torch.from_numpy(position_ids),
            "cu_seq_lens_q": torch.from_numpy(boundaries),
            "cu_seq_lens_k": torch.from_numpy(boundaries.copy()),
            "max_length_q": longest,
            "max_length_k": longest,
        }
        if shared:
            batch |= _shared_keys(boundaries, shared)
        if self.with_source:
            batch["source_ids"] = torch.from_numpy(source_ids)
        return batch


def _shared_keys(boundaries: np.ndarray, shared: Mapping[int, int]) -> dict[str, Any]:
    """What segments attend to of which some begin with tokens of the one before them."""
    keys = []
    for number, (start, stop) in enumerate(itertools.pairwise(boundaries)):
        before = boundaries[max(number - 1, 0)]
        prefix = np.arange(before, before + shared.get(number, 0))
        keys.append(np.concatenate([prefix, np.arange(start, stop)]))
    lengths = [len(each) for each in keys]
    return {
        "shared_keys": torch.from_numpy(np.concatenate(keys)),
        "cu_seq_lens_k": torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        "max_length_k": max(lengths),
    }


class PaddingCollator:
    """One sample a row, padded on the right.

    Args:
        pad_token_id: fills the tails; never used to find them, so it may equal eos.
        pad_to_multiple_of: rounds S up.
        pad_to: S, where every batch must have the same; otherwise the batch's longest sample.
        with_source: add ``source_ids``.

    Returns from a call:
        ``input_ids``, ``labels``, ``attention_mask`` (B, S) int64; with ``with_source`` also
        ``source_ids`` (B, S) int64, -1 in the tail.
    """

    def __init__(
        self,
        pad_token_id: int,
        *,
        pad_to_multiple_of: int = 1,
        pad_to: int | None = None,
        with_source: bool = False,
    ) -> None:
        self.pad_token_id = pad_token_id
        self.pad_to_multiple_of = pad_to_multiple_of
        self.pad_to = pad_to
        self.with_source = with_source

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:
        longest = self.pad_to or max(len(sample["input_ids"]) for sample in samples)
        size = -(-longest // self.pad_to_multiple_of) * self.pad_to_multiple_of
        shape = (len(samples), size)
        input_ids = np.full(shape, self.pad_token_id, dtype=np.int64)
        labels = np.full(shape, IGNORE_INDEX, dtype=np.int64)
        attention_mask = np.zeros(shape, dtype=np.int64)
        source_ids = np.full(shape, -1, dtype=np.int64)
        for row, sample in enumerate(samples):
            length = len(sample["input_ids"])
            input_ids[row, :length] = sample["input_ids"]
            labels[row, :length] = _labels(sample)
            attention_mask[row, :length] = 1
            source_ids[row, :length] = sample["source"]
        batch: dict[str, Any] = {
            "input_ids": torch.from_numpy(input_ids),
            "labels": torch.from_numpy(labels),
            "attention_mask": torch.from_numpy(attention_mask),
        }
        if self.with_source:
            batch["source_ids"] = torch.from_numpy(source_ids)
        return batch


class ImageCollator:
    """Adds what the model takes of images to a batch of samples, or of packed rows.

    A batch without images stays as it is.

    Returns from a call:
        the batch with what the model's image processor makes of all images, end to end in the order
        of the samples; where places of tokens have several axes, ``position_ids`` are (4, B, S).
    """

    def __init__(self, collate: PackingCollator | PaddingCollator, vision: Vision) -> None:
        self.collate = collate
        self.vision = vision

    def __call__(self, items: Sequence[Any]) -> dict[str, Any]:
        batch = self.collate(items)
        rows = [[item] if isinstance(item, Mapping) else item for item in items]
        images = [image for row in rows for sample in row for image in sample.get("images", ())]
        if not images:
            return batch
        batch |= self.vision.pixels(images)
        if self.vision.family.positions == "mrope":
            batch["position_ids"] = self._positions(batch, rows)
        return batch

    def _positions(
        self, batch: Mapping[str, Any], rows: Sequence[Sequence[Sample]]
    ) -> torch.Tensor:
        """(4, B, S): each token's place in its sample, then its time, row and column there."""
        shape = batch["input_ids"].shape
        plain = batch.get("position_ids")
        if plain is None:
            plain = torch.arange(shape[1]).expand(shape)
        found = plain.expand(4, *shape).numpy().copy()
        for number, row in enumerate(rows):
            start = 0
            for sample in row:
                end = start + len(sample["input_ids"])
                if sample.get("images"):
                    positions = self.vision.positions(sample["input_ids"], sample["images"])
                    found[:, number, start:end] = positions
                start = end
        return torch.from_numpy(found)
