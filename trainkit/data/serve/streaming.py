"""Samples straight from their files, for data that does not fit on the disk twice.

Rows are read from each source at about the same fraction of its bytes and dealt out one by one over
shards (ranks, and the loading processes of each), so that each gets as many. A shard gathers
samples into blocks of ``buffer``, shuffles and packs each block, and builds the next one meanwhile,
so memory is bounded by two blocks a shard and no row has to wait for a whole block.

A block is a pure function of (files, seed, epoch, shard, its starting position), so a position is a
few numbers. Going on from it costs one block, rebuilt, and getting to its start: one seek in plain
files of lines; in others (.gz, .zst, parquet, csv, arrays) the rows before it are cut out of the
file again, though not parsed.

What streaming gives up, compared with :func:`trainkit.data.build.prepare`:

- there is no length, so a run needs ``max_steps``;
- rows are shuffled and packed within a block, not over all data, and their order depends on the
  number of shards;
- ``weight``, ``epochs`` and ``max_samples`` would need to know all rows, and are refused;
- a file without anything to train is noticed when it is through, too many dropped rows while they
  are read.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from trainkit.data.build.builder import BuiltRows, SampleBuilder
from trainkit.data.build.ledger import Entry
from trainkit.data.build.packing import pack
from trainkit.data.build.summary import look_at
from trainkit.data.options import DataOptions
from trainkit.data.read.finding import resolve_files
from trainkit.data.read.hub import hub_name
from trainkit.data.read.reading import RawRow
from trainkit.data.serve.stream_reader import Position, RunReader, Sharding
from trainkit.errors import DataError
from trainkit.options import Source

BUFFER = 4096
"""Samples in a block, by default."""

FEWEST_ROWS_TO_JUDGE = 1000
"""A fraction of dropped rows is not held against a limit before so many rows are read."""

Sample = dict[str, Any]


@dataclass(frozen=True)
class StreamedRow:
    """One row of a batch.

    Attributes:
        samples: as ``PreparedData`` gives them; one without packing.
        position: behind this row.
        entries: for the ledger; with the first row of a block, in the first epoch.
        num_rows, num_dropped: rows read for this block, likewise.
    """

    samples: list[Sample]
    position: Position
    entries: tuple[Entry, ...] = ()
    num_rows: int = 0
    num_dropped: int = 0


class SampleStream:
    """Endless rows of samples, epoch after epoch.

    Args:
        sources: with nothing but a path, a format, columns, roles and a name.
        tokenizer: a fast one.
        options: how rows become samples; the seed decides the order.
        packing: rows of complete samples, best-fit within a block; or one sample a row.
        shuffle: False keeps the order of the files (and of the packer).
        buffer: samples in a block.

    Raises:
        DataError: a source asks for what streaming cannot do, or is not there.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        tokenizer: PreTrainedTokenizerBase,
        options: DataOptions,
        *,
        packing: bool,
        shuffle: bool = True,
        buffer: int = BUFFER,
    ) -> None:
        if buffer < 1:
            raise DataError(f"a buffer of {buffer} samples holds none", where="data.streaming")
        self.sources = tuple(sources)
        for source in self.sources:
            _refuse_unknowable(source)
        self.files = [resolve_files(source.path) for source in self.sources]
        self.options = options
        self.packing = packing
        self.shuffle = shuffle
        self.buffer = buffer
        self.builder = SampleBuilder(tokenizer, options)
        self.model = str(tokenizer.name_or_path)

    def rows(
        self, start: Position | None = None, *, shard: int = 0, num_shards: int = 1
    ) -> Iterator[StreamedRow]:
        """The rows of one shard, from ``start`` on, without end.

        Raises:
            DataError: a file is damaged or has nothing to train, too many rows are dropped, or the
                files are too small for so many shards.
        """
        start = start or Position()
        block = Block(self, replace(start, row=0), shard, num_shards)
        block.fill(self.buffer)
        used = start.row
        while True:
            following = block.following()
            rows = block.arranged()
            for number, samples in enumerate(rows[used:], used):
                # The next block grows as this one is used up.
                following.fill(self.buffer * (number + 1) // len(rows))
                yield block.row(number, samples)
            following.fill(self.buffer)
            block, used = following, 0

    def first(self, num_samples: int) -> tuple[list[list[Sample]], BuiltRows, list[Counter[str]]]:
        """The first rows, for a look before training, and what was found on the way.

        Returns:
            the rows; what was found over all sources; the counts of each source.
        """
        block = Block(self, Position(), 0, 1)
        block.fill(num_samples)
        return block.arranged(), block.found, block.counts

    def check_dropped(self, num_rows: int, num_dropped: int, *, is_all: bool = False) -> None:
        """Hold dropped rows against ``max_dropped``.

        Args:
            num_rows: read so far.
            num_dropped: of these.
            is_all: no more rows will come.

        Raises:
            DataError: there are more than allowed.
        """
        limit = self.options.max_dropped
        if limit is None:
            return
        if isinstance(limit, int):
            exceeded = num_dropped > limit
        else:
            exceeded = num_dropped > limit * num_rows
            exceeded &= is_all or num_rows >= FEWEST_ROWS_TO_JUDGE
        if exceeded:
            raise DataError(
                f"{num_dropped} of the {num_rows} rows read so far were dropped, more than "
                f"max_dropped {limit}",
                where="data.train",
                fix="fix the rows that dropped.jsonl names, or raise data.max_dropped",
            )


class Block:
    """Samples that are shuffled and packed together.

    Args:
        stream: whose they are.
        position: where the block starts.
        shard, num_shards: which of the rows are its own.
        reader: goes on reading; None starts at the position.
    """

    def __init__(
        self,
        stream: SampleStream,
        position: Position,
        shard: int,
        num_shards: int,
        reader: RunReader | None = None,
    ) -> None:
        self.stream = stream
        self.position = position
        self.shard = shard
        self.num_shards = num_shards
        # Each epoch deals again, from its own part of the seed's numbers.
        seed = (stream.options.seed << 32) + (position.epoch << 48) if stream.shuffle else None
        sharding = Sharding(shard, num_shards, seed)
        self.reader = reader or RunReader(
            stream.files,
            position,
            sharding,
            max_row_bytes=stream.options.max_row_bytes,
            model=stream.model,
        )
        self.found = BuiltRows()
        self.counts: list[Counter[str]] = [Counter() for _ in stream.sources]
        self._samples: list[Sample] = []
        self._entries: list[Entry] = []
        self._num_rows = 0
        self._num_dropped = 0
        self._has_ended = False

    def fill(self, num_samples: int) -> None:
        """Read until there are so many samples, or the epoch ends.

        A block grows to the stream's buffer whether it is filled at once or bit by bit.
        """
        while len(self._samples) < num_samples and not self._has_ended:
            run = self.reader.next_run()
            if run is None:
                self._end()
            else:
                self._build(*run)

    def arranged(self) -> list[list[Sample]]:
        """The block's rows, in their order."""
        position, stream = self.position, self.stream
        place = [stream.options.seed, position.epoch, self.shard, position.block]
        random = np.random.default_rng(place)
        held = self._samples
        if stream.packing:
            lengths = np.array([len(sample["input_ids"]) for sample in held])
            seed = int(random.integers(2**31))
            packed = pack(lengths, stream.options.max_length, seed=seed, epoch=0)
            return [[held[int(index)] for index in row] for row in packed]
        order = random.permutation(len(held)) if stream.shuffle else np.arange(len(held))
        return [[held[int(index)]] for index in order]

    def row(self, number: int, samples: list[Sample]) -> StreamedRow:
        """A row as it is handed out; the first one brings what was counted."""
        position = replace(self.position, row=number + 1)
        if number:
            return StreamedRow(samples, position)
        entries = tuple(self._entries)
        return StreamedRow(samples, position, entries, self._num_rows, self._num_dropped)

    def following(self) -> "Block":
        """The block behind this one, which must be full, still empty."""
        before, reader = self.position, self.reader
        if self._has_ended:
            position = Position(epoch=before.epoch + 1)
            block = Block(self.stream, position, self.shard, self.num_shards)
        else:
            position = Position(
                epoch=before.epoch,
                block=before.block + 1,
                num_dealt=reader.num_dealt,
                num_rows=before.num_rows + self._num_rows,
                num_dropped=before.num_dropped + self._num_dropped,
                places=tuple(reader.places),
            )
            block = Block(self.stream, position, self.shard, self.num_shards, reader)
        if not self._samples:
            # The rows at the end of an epoch were all dropped: the next block tells of them.
            block.inherit(self)
        return block

    def inherit(self, other: "Block") -> None:
        """Take over what ``other`` had no row to tell with."""
        self._entries += other._entries
        self._num_rows += other._num_rows
        self._num_dropped += other._num_dropped

    def _end(self) -> None:
        self._has_ended = True
        if self.position.block == 0 and not self._samples:
            raise DataError(
                f"shard {self.shard} of {self.num_shards} got no sample from a pass over all files",
                where="data.train",
                fix="fewer processes (ranks, or training.dataloader_num_workers), or no streaming: "
                "the data is small",
            )
        if self.position.epoch == 0:
            self._check_dropped(is_all=True)

    def _build(self, number: int, file: Path, run: list[RawRow]) -> None:
        batch = self.stream.builder.build(run, self.stream.sources[number])
        self.reader.count(number, len(run), batch.num_kept)
        self.found.ends.update(batch.ends)
        self.found.notes |= batch.notes
        self.found.counts.update(batch.counts)
        self.counts[number].update(batch.counts)
        start = 0
        for length, row in zip(batch.lengths, batch.rows, strict=True):
            end = start + length
            self._samples.append(
                {
                    "input_ids": batch.input_ids[0][start:end],
                    "loss_mask": batch.loss_mask[0][start:end],
                    "source": number,
                    "id": f"{file}:{run[row].line}",
                }
            )
            start = end
        entries = [_entry(file, run, event, self.stream.options) for event in batch.events]
        if self.position.epoch > 0:
            return  # the same rows again
        self._entries += entries
        self._num_rows += len(run)
        self._num_dropped += len(run) - batch.num_kept
        self._check_dropped()
        if not self._samples and self._num_rows >= max(FEWEST_ROWS_TO_JUDGE, self.stream.buffer):
            raise DataError(
                f"none of {self._num_rows} rows in a row can be used"
                + "".join(f"\n  {e.file}:{e.line}: {e.detail}" for e in self._entries[:3]),
                where=str(file),
                fix=look_at(file, self.stream.model),
            )

    def _check_dropped(self, *, is_all: bool = False) -> None:
        num_rows = self.position.num_rows + self._num_rows
        num_dropped = self.position.num_dropped + self._num_dropped
        self.stream.check_dropped(num_rows, num_dropped, is_all=is_all)


def _entry(file: Path, run: Sequence[RawRow], event: Any, options: DataOptions) -> Entry:
    line = run[event.row].line
    if event.reason == "too_long" and options.truncation == "error":
        raise DataError(
            f"the row has {event.detail}",
            where=f"{file}:{line}",
            fix="raise data.max_length, or choose another data.truncation",
        )
    details = asdict(event)
    del details["row"]
    return Entry(file=str(file), line=line, **details)


def _refuse_unknowable(source: Source) -> None:
    if source.weight is not None or source.max_samples is not None or source.epochs != 1:
        raise DataError(
            "weight, epochs and max_samples (also as FILE#N) need to know all rows, which "
            "streaming does not",
            where=source.path,
            fix="remove them, or set data.streaming: false",
        )
    if hub_name(source.path):
        raise DataError(
            "streaming reads files, and this is the name of a data set on the hub",
            where=source.path,
            fix="download its files and name them, or set data.streaming: false",
        )
