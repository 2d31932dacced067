"""Samples straight from their files, for data that does not fit on the disk twice.

Rows are read from each source at about the same fraction of its bytes and dealt out one by one over
shards (ranks, and the loading processes of each), so that each gets as many. A shard gathers
samples into blocks of ``buffer``, shuffles and packs each block, and builds the next one meanwhile,
so memory is bounded by two blocks a shard and no row has to wait for a whole block.

A block is a pure function of (files, seed, epoch, shard, its starting position), so a position is a
few numbers. Going on from it costs one block, rebuilt, and getting to its start: one seek in plain
files of lines; in others (.gz, .zst, parquet, csv, arrays) the rows before it are cut out of the
file again, though not parsed.

What streaming gives up, compared with :func:`trainkit.data.sources.prepare`:

- there is no length, so a run needs ``max_steps``;
- rows are shuffled and packed within a block, not over all data, and their order depends on the
  number of shards;
- ``weight``, ``epochs`` and ``max_samples`` would need to know all rows, and are refused;
- a file without anything to train is noticed when it is through, too many dropped rows while they
  are read.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from trainkit.data.builder import BuiltRows, SampleBuilder, entry_of
from trainkit.data.datasets import pack
from trainkit.data.files import (
    BEGINNING,
    FilePosition,
    RawRow,
    hub_name,
    is_packed,
    read_rows,
    resolve_files,
    unread_files,
)
from trainkit.data.options import BUFFER, DataOptions
from trainkit.data.store import Entry
from trainkit.data.summary import ignored_fields, look_at, summary_of
from trainkit.errors import DataError
from trainkit.options import Source

ROWS_PER_RUN = 64
BYTES_PER_RUN = 1 << 20


@dataclass(frozen=True)
class SourcePosition:
    """How far one source is read in this epoch.

    Attributes:
        file: the number of the file being read; as many as there are files at the end.
        num_mine: rows of this file that fell to this shard.
    """

    file: int = 0
    next: FilePosition = BEGINNING
    size_read: int = 0
    num_mine: int = 0
    num_kept: int = 0


@dataclass(frozen=True)
class Position:
    """Where a shard is: a few numbers, from which it goes on exactly.

    Attributes:
        num_dealt: rows of all sources before the block, whatever shard they fell to.
        num_rows, num_dropped: of this shard before the block, in the first epoch.
        places: of the sources before the block; empty at the start of an epoch.
    """

    epoch: int = 0
    block: int = 0
    row: int = 0
    num_dealt: int = 0
    num_rows: int = 0
    num_dropped: int = 0
    places: tuple[SourcePosition, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Position":
        places = tuple(
            SourcePosition(**{**place, "next": FilePosition(**place["next"])})
            for place in values["places"]
        )
        return cls(**{**values, "places": places})


@dataclass(frozen=True)
class Sharding:
    """Which rows of an epoch fall to a shard: of as many rows as there are shards, each gets one.

    So shards are equal to within a row. Which one a shard gets is drawn, since sources take turns
    in reading and files have patterns: in a fixed order it would see one source and miss another.

    Attributes:
        seed: of the draw; None deals in a fixed order.
    """

    shard: int
    num_shards: int
    seed: int | None

    def is_mine(self, number: int) -> bool:
        """Whether this shard gets the row of this number within the epoch."""
        hand, place = divmod(number, self.num_shards)
        turned = 0 if self.seed is None else _scramble(self.seed + hand)
        return (place + turned) % self.num_shards == self.shard


MASK64 = (1 << 64) - 1


def _scramble(number: int) -> int:
    """The finaliser of SplitMix64: neighbouring numbers come out as if drawn."""
    number = (number + 1) * 0x9E3779B97F4A7C15 & MASK64
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & MASK64
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & MASK64
    return number ^ (number >> 31)


class RunReader:
    """Runs of rows over all sources of one epoch, each at about the same fraction of its bytes."""

    def __init__(
        self,
        files: Sequence[Sequence[Path]],
        position: Position,
        sharding: Sharding,
        *,
        model: str = "DIR",
    ) -> None:
        self._files = files
        self._sizes = [max(sum(map(_size_of, each)), 1) for each in files]
        self._model = model
        self._open: list[Iterator[RawRow] | None] = [None] * len(files)
        self._sharding = sharding
        self.num_dealt = position.num_dealt
        self.places = list(position.places) or [SourcePosition() for _ in files]

    def next_run(self) -> tuple[int, Path, list[RawRow]] | None:
        """The next rows of this shard: the source's number, the file, the rows; None at the end."""
        while True:
            going = [n for n, place in enumerate(self.places) if place.file < len(self._files[n])]
            if not going:
                return None
            number = min(going, key=lambda n: self.places[n].size_read / self._sizes[n])
            file = self._files[number][self.places[number].file]
            num_read, run = self._read(number, file)
            if run:
                return number, file, run
            if not num_read:
                self._close(number, file)

    def count(self, number: int, num_mine: int, num_kept: int) -> None:
        place = self.places[number]
        self.places[number] = replace(
            place, num_mine=place.num_mine + num_mine, num_kept=place.num_kept + num_kept
        )

    def _read(self, number: int, file: Path) -> tuple[int, list[RawRow]]:
        """Read on for all shards: how many rows that are, and those of this shard.

        Where a run ends depends on all rows, so every shard reads the sources in the same order.
        """
        place = self.places[number]
        rows = self._open[number]
        if rows is None:
            rows = read_rows(file, start=place.next)
            self._open[number] = rows
        mine: list[RawRow] = []
        last: RawRow | None = None
        num_read = size = 0
        for row in rows:
            if self._sharding.is_mine(self.num_dealt + num_read):
                mine.append(row)
            last = row
            num_read += 1
            size += len(row.payload) if isinstance(row.payload, bytes) else 1000
            if num_read >= ROWS_PER_RUN * self._sharding.num_shards or (
                size >= BYTES_PER_RUN * self._sharding.num_shards
            ):
                break
        if last is not None:
            behind = FilePosition(last.number + 1, last.line + 1, last.end)
            self.places[number] = replace(place, next=behind, size_read=place.size_read + size)
        self.num_dealt += num_read
        return num_read, mine

    def _close(self, number: int, file: Path) -> None:
        place = self.places[number]
        if place.next.rows == 0:
            raise DataError("the file holds no rows", where=str(file), fix="check how it was made")
        enough = (
            1 if self._sharding.num_shards == 1 else ROWS_PER_RUN
        )  # a shard of few rows may err
        if place.num_mine >= enough and not place.num_kept:
            raise DataError(
                f"no token of this file would be trained ({place.num_mine} rows)",
                where=str(file),
                fix=look_at(file, self._model),
            )
        self._open[number] = None
        self.places[number] = SourcePosition(file=place.file + 1, size_read=place.size_read)


def _size_of(file: Path) -> int:
    """Bytes of the rows in a file, roughly: text packs to about a quarter."""
    return file.stat().st_size * (4 if is_packed(file) else 1)


FEWEST_ROWS_TO_JUDGE = 1000
"""A fraction of dropped rows is not held against a limit before so many rows are read."""

Sample = dict[str, Any]


@dataclass(frozen=True)
class StreamedRow:
    """One row of a batch.

    Attributes:
        samples: as ``PreparedData`` gives them; one without packing.
        entries: for the ledger; with the first row of a block, in the first epoch.
    """

    samples: list[Sample]
    position: Position
    entries: tuple[Entry, ...] = ()
    num_rows: int = 0
    num_dropped: int = 0


class SampleStream:
    """Endless rows of samples, epoch after epoch."""

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
        """The rows of one shard, from ``start`` on, without end."""
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
    """Samples that are shuffled and packed together."""

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
        self.reader = reader or RunReader(stream.files, position, sharding, model=stream.model)
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
        for row, _, input_ids, loss_mask, *_ in batch.samples:
            place = {"source": number, "id": f"{file}:{run[row].line}"}
            self._samples.append({"input_ids": input_ids, "loss_mask": loss_mask, **place})
        entries = [entry_of(event, run, file, self.stream.options) for event in batch.events]
        if self.position.epoch > 0:
            return  # the same rows again
        self._entries += entries
        self._num_rows += len(run)
        self._num_dropped += len(run) - batch.num_kept - batch.num_left_out
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


NUM_SAMPLES = 256


class FirstRows:
    """A few rows as a map-style dataset, for checks before training."""

    def __init__(self, rows: list[list[Sample]], *, packing: bool) -> None:
        self._rows = rows
        self._packing = packing
        self.lengths: np.ndarray = np.array(
            [sum(len(sample["input_ids"]) for sample in row) for row in rows], dtype=np.int64
        )

    def set_epoch(self, epoch: int) -> None:
        """They are the same in every epoch."""

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._rows[index] if self._packing else self._rows[index][0]


def first_look(
    stream: SampleStream, tokenizer: PreTrainedTokenizerBase, *, num_shards: int
) -> tuple[FirstRows, dict[str, Any], dict[str, Any]]:
    """Build the first samples, as every process will.

    Returns:
        Rows of its first samples; the content of ``data.json``, without counts of rows and tokens;
        and everything that decides which tokens a step trains on, by name.
    """
    rows, found, counts = stream.first(min(NUM_SAMPLES, stream.buffer))
    samples = [sample for row in rows for sample in row]

    def num_trained_of(index: int) -> int:
        trained = ((s["input_ids"] == index) & (s["loss_mask"] == 1) for s in samples)
        return sum(map(int, map(np.count_nonzero, trained)))

    places = [
        (number, source, file)
        for number, (source, files) in enumerate(zip(stream.sources, stream.files, strict=True))
        for file in files
    ]
    summary = summary_of(
        tokenizer,
        stream.options,
        files=[
            {"path": str(file), "source": source.label, "bytes": file.stat().st_size}
            for _, source, file in places
        ],
        sources=[
            {
                "name": source.label,
                "ignored_fields": ignored_fields(each),
                "not_read": [str(file) for file in unread_files(source.path)],
            }
            for source, each in zip(stream.sources, counts, strict=True)
        ],
        counts=found.counts,
        ends=found.ends,
        notes=found.notes,
        num_trained_of=num_trained_of,
    )
    summary["streaming"] = {"buffer": stream.buffer, "num_shards": num_shards}
    chosen = ("max_length", "mask", "truncation", "thinking", "system_policy", "roles", "seed")
    parts = {
        "files": [
            (sampled_digest(file, len(places)), number, None, str(file))
            for number, _, file in places
        ],
        "formats": [(source.format, sorted(source.columns.items())) for source in stream.sources],
        "streaming": summary["streaming"],
        "template": summary["template_sha256"],
        "tokenizer": summary["tokenizer_sha256"],
        **{key: summary["options"][key] for key in chosen},
        "packing": stream.packing,
        "shuffle": stream.shuffle,
    }
    return FirstRows(rows, packing=stream.packing), summary, parts


PIECE_BYTES = 1 << 16

MOST_PIECES = 4096
"""So many pieces are read of all files together, but at least the first and last of each."""


def sampled_digest(file: Path, num_files: int = 1) -> str:
    """A digest of a file's size and of pieces spread evenly over it; of all of it up to 1 MiB.

    Reading streamed files whole to hash them would take as long as training on them. A change of
    the same size between the pieces is not seen.
    """
    size = file.stat().st_size
    count = min(16, max(2, MOST_PIECES // num_files))
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as opened:
        for number in range(count):
            opened.seek(max(size - PIECE_BYTES, 0) * number // (count - 1))
            digest.update(opened.read(PIECE_BYTES))
    return digest.hexdigest()
