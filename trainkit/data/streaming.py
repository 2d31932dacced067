"""Samples straight from their files, for data that does not fit on the disk twice.

What streaming gives up, compared with :func:`trainkit.data.prepare`:

- there is no length, so a run needs ``max_steps``;
- rows are shuffled within a buffer, not over all data, and packed within a window;
- ``weight`` and ``max_samples`` would need to know all rows, and are refused;
- finding a position again means reading everything before it (the ledger is not written twice);
- a file without anything to train, or too many dropped rows, are noticed only at their end.
"""

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from trainkit.data.builder import SampleBuilder
from trainkit.data.ledger import Entry, Ledger
from trainkit.data.options import DataOptions, Source
from trainkit.data.packing import pack
from trainkit.data.reading import RawRow, read_rows, resolve_files
from trainkit.errors import DataError

ROWS_PER_RUN = 64


class SampleStream:
    """An iterable over samples; each iteration reads the files anew.

    Args:
        sources: read one after another; their files in order.
        tokenizer: a fast one.
        options: how rows become samples.
        ledger: gets every dropped, cut and repaired row of the first iteration.
        shuffle_buffer: samples among which the next one is drawn; 0 keeps the order of the files.
        dist_rank, world_size: this process takes every ``world_size``-th run of rows.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        tokenizer: PreTrainedTokenizerBase,
        options: DataOptions,
        *,
        ledger: Ledger,
        shuffle_buffer: int = 0,
        dist_rank: int = 0,
        world_size: int = 1,
    ) -> None:
        for source in sources:
            if source.weight is not None or source.max_samples is not None or source.epochs != 1:
                raise DataError(
                    "weight, epochs and max_samples need to know all rows, which streaming does "
                    "not",
                    where=source.path,
                    fix="remove them, or prepare the data instead of streaming it",
                )
        self.sources = tuple(sources)
        self.builder = SampleBuilder(tokenizer, options)
        self.options = options
        self.shuffle_buffer = shuffle_buffer
        self.dist_rank = dist_rank
        self.world_size = world_size
        self.epoch = 0
        self.num_rows = 0
        self.num_dropped = 0
        self._ledger: Ledger | None = ledger

    def set_epoch(self, epoch: int) -> None:
        """Choose the order in which the buffer is drawn from."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Samples as :class:`trainkit.data.prepared.PreparedData` gives them."""
        samples = self._samples()
        if self.shuffle_buffer:
            samples = self._shuffled(samples)
        yield from samples
        self._ledger = None  # the next iteration would write the same lines again

    def packed(self, *, window: int = 2048) -> Iterator[list[dict[str, Any]]]:
        """Rows of whole samples, packed best-fit within windows of that many samples."""
        samples = iter(self)
        while held := list(islice(samples, window)):
            lengths = np.array([len(sample["input_ids"]) for sample in held])
            rows = pack(lengths, self.options.max_length, seed=self.options.seed, epoch=self.epoch)
            for row in rows:
                yield [held[int(index)] for index in row]

    def _samples(self) -> Iterator[dict[str, Any]]:
        turn = 0
        for number, source in enumerate(self.sources):
            for file in resolve_files(source.path):
                kept = 0
                rows = read_rows(file, max_row_bytes=self.options.max_row_bytes)
                while run := list(islice(rows, ROWS_PER_RUN)):
                    mine = turn % self.world_size == self.dist_rank
                    turn += 1
                    if mine:
                        for sample in self._build(run, source, file):
                            kept += 1
                            yield {**sample, "source": number}
                if kept == 0 and self.world_size == 1:
                    raise DataError("no token of this file is trained", where=str(file))

    def _build(self, run: list[RawRow], source: Source, file: Path) -> Iterator[dict[str, Any]]:
        batch = self.builder.build(run, source)
        self.num_rows += len(run)
        self.num_dropped += len(run) - batch.num_kept
        limit = self.options.max_dropped
        if isinstance(limit, int) and self.num_dropped > limit:
            raise DataError(f"{self.num_dropped} rows were dropped", where=str(file))
        if self._ledger is not None:
            for event in batch.events:
                self._ledger.add(
                    Entry(
                        str(file),
                        run[event.row].line,
                        event.action,
                        event.reason,
                        event.detail,
                        event.tokens,
                        event.trained_tokens,
                    )
                )
        start = 0
        for length in batch.lengths:
            end = start + length
            yield {
                "input_ids": batch.input_ids[0][start:end],
                "loss_mask": batch.loss_mask[0][start:end],
            }
            start = end

    def _shuffled(self, samples: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        draw = random.Random(f"{self.options.seed}/{self.epoch}/{self.dist_rank}")
        held = list(islice(samples, self.shuffle_buffer))
        for sample in samples:
            place = draw.randrange(len(held))
            yield held[place]
            held[place] = sample
        draw.shuffle(held)
        yield from held
