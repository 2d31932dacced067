"""Reading several sources side by side, in runs of rows, from any position on."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trainkit.data.build.summary import look_at
from trainkit.data.read.opening import is_packed
from trainkit.data.read.reading import BEGINNING, FilePosition, RawRow, read_rows
from trainkit.errors import DataError

ROWS_PER_RUN = 64
BYTES_PER_RUN = 1 << 20


@dataclass(frozen=True)
class SourcePosition:
    """How far one source is read in this epoch.

    Attributes:
        file: the number of the file being read; as many as there are files at the end.
        next: the place in it.
        size_read: bytes read of the source.
        num_mine: rows of this file that fell to this shard.
        num_kept: those of them that can be used.
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
        epoch: passes over the files before this one.
        block: its number within the epoch.
        row: rows of the block that are used up.
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
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Position":
        """What `to_dict` gave."""
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
        shard, num_shards: which one, of how many.
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
    """Runs of rows over all sources of one epoch, each at about the same fraction of its bytes.

    Args:
        files: of each source.
        position: where to begin; its places and number of dealt rows are read.
        sharding: which rows are read.
        max_row_bytes: see :class:`trainkit.data.options.DataOptions`.
        model: where the tokenizer is from.
    """

    def __init__(
        self,
        files: Sequence[Sequence[Path]],
        position: Position,
        sharding: Sharding,
        *,
        max_row_bytes: int,
        model: str = "DIR",
    ) -> None:
        self._files = files
        self._sizes = [max(sum(map(_size_of, each)), 1) for each in files]
        self._limit = max_row_bytes
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
        """Note what became of a run."""
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
            rows = read_rows(file, max_row_bytes=self._limit, start=place.next)
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
