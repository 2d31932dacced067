"""Streamed samples in training: loading processes, exact positions, the ledger of dropped rows.

Every batch carries the position behind it, so the position of the run is that of the last batch it
has trained on, however far the loading processes are ahead. Each rank saves its own next to the
weights. The ledger is cut back to its length at the checkpoint when a run goes on from there, so it
names each row once.
"""

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from trainkit.data.build.ledger import CHANGED, Entry, Ledger
from trainkit.data.serve.stream_reader import Position
from trainkit.data.serve.streaming import SampleStream
from trainkit.errors import CheckpointError, DataError, TrainkitError

NOTE = "stream"
"""The key of a `BatchNote` in a batch."""


@dataclass(frozen=True)
class BatchNote:
    """What a batch brings to the main process.

    Attributes:
        slot: the number of the loading process's shard.
        position: behind the batch.
        entries: for the ledger.
        num_rows, num_dropped: rows read since the last note.
    """

    slot: int
    position: Position
    entries: tuple[Entry, ...]
    num_rows: int
    num_dropped: int


class StreamState:
    """Where the stream of one rank is, and what became of its rows.

    Args:
        stream: the stream.
        ledger: the file for dropped rows; cut and repaired ones go next to it.
        num_slots: loading processes, at least 1.
        dist_rank, world_size: this process's share of the rows.
        writes: whether this process notes what became of them: one of those that share them.
    """

    def __init__(
        self,
        stream: SampleStream,
        ledger: Path,
        *,
        num_slots: int,
        dist_rank: int,
        world_size: int,
        writes: bool = True,
    ) -> None:
        self.stream = stream
        self._writes = writes
        self.dist_rank = dist_rank
        self.world_size = world_size
        self.positions: list[Position | None] = [None] * num_slots
        self.next_slot = 0
        self.num_rows = 0
        self.num_dropped = 0
        mine = ledger if dist_rank == 0 else ledger.with_stem(f"{ledger.stem}.rank{dist_rank}")
        changed = mine.with_name(mine.name.replace(ledger.stem, Path(CHANGED).stem))
        self._files = (mine, changed)
        self._ledger = Ledger(mine, changed)

    def take(self, note: BatchNote) -> None:
        """A batch was handed to the loop."""
        self.positions[note.slot] = note.position
        self.next_slot = (note.slot + 1) % len(self.positions)
        self.num_rows += note.num_rows
        self.num_dropped += note.num_dropped
        if note.entries and self._writes:
            for entry in note.entries:
                self._ledger.add(entry)
            self._ledger.flush()

    def save(self, directory: Path) -> None:
        """Write the file of this share of the rows into a checkpoint."""
        if not self._writes:
            return
        values = {
            "positions": [p.to_dict() if p else None for p in self.positions],
            "next_slot": self.next_slot,
            "num_rows": self.num_rows,
            "num_dropped": self.num_dropped,
            "ledger_bytes": [file.stat().st_size if file.exists() else 0 for file in self._files],
        }
        text = json.dumps(values, indent=1)
        (directory / _file_name(self.dist_rank)).write_text(text, encoding="utf-8")

    def load(self, directory: Path) -> None:
        """Go on from a checkpoint.

        Raises:
            CheckpointError: it has no position for this rank and as many loading processes.
        """
        file = directory / _file_name(self.dist_rank)
        if not file.exists():
            raise CheckpointError(
                "the checkpoint does not say where the stream was",
                where=str(directory),
                fix="continue with data.streaming and as many processes as the run had",
            )
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            positions = [Position.from_dict(p) if p else None for p in values["positions"]]
            counts = [int(values[key]) for key in ("next_slot", "num_rows", "num_dropped")]
            sizes = [int(size) for size in values["ledger_bytes"]]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(
                "the position of the stream is not one that this version of trainkit reads",
                where=str(file),
                fix="continue with the version that wrote it (environment.json names it), or "
                "begin a new run from the weights: "
                + shlex.join(["trainkit", "merge", str(directory), "DIR"]),
            ) from error
        if len(positions) != len(self.positions):
            raise CheckpointError(
                f"the run streamed with {len(positions)} loading processes a rank, and "
                f"not {len(self.positions)}",
                where=str(file),
                fix="set training.dataloader_num_workers to what it was",
            )
        self.positions = positions
        self.next_slot, self.num_rows, self.num_dropped = counts
        for ledger, size in zip(self._files, sizes, strict=True):
            if ledger.exists() and ledger.stat().st_size > size:
                with ledger.open("rb+") as stream:
                    stream.truncate(size)


def _file_name(dist_rank: int) -> str:
    return f"stream_rank{dist_rank}.json"


class _Batches(IterableDataset[Any]):
    """The batches of one loading process; an error of ours comes as an item, with its message."""

    def __init__(
        self, state: StreamState, collate: Callable[[Sequence[Any]], dict[str, Any]], size: int
    ) -> None:
        self._state = state
        self._collate = collate
        self._size = size

    def __iter__(self) -> Iterator[dict[str, Any] | TrainkitError]:
        state = self._state
        worker = get_worker_info()
        num_slots = len(state.positions)
        # The loader asks process 0 first: it takes the slot whose turn it is.
        slot = (state.next_slot + (0 if worker is None else worker.id)) % num_slots
        rows = state.stream.rows(
            state.positions[slot],
            shard=state.dist_rank * num_slots + slot,
            num_shards=state.world_size * num_slots,
        )
        while True:
            try:
                taken = list(islice(rows, self._size))
            except TrainkitError as error:
                yield error
                return
            packed = state.stream.packing
            batch = self._collate([row.samples if packed else row.samples[0] for row in taken])
            batch[NOTE] = BatchNote(
                slot,
                taken[-1].position,
                tuple(entry for row in taken for entry in row.entries),
                sum(row.num_rows for row in taken),
                sum(row.num_dropped for row in taken),
            )
            yield batch


class StreamLoader(DataLoader[Any]):
    """Endless batches of a stream; what they say about it goes to its state.

    Args:
        state: of this rank; kept up to date while batches are taken.
        collate: turns rows into a batch.
        batch_size: rows in one.
        seed: of what torch draws for the loading processes.
        num_workers, prefetch_factor, pin_memory: as torch has them.
    """

    def __init__(
        self,
        state: StreamState,
        collate: Callable[[Sequence[Any]], dict[str, Any]],
        *,
        batch_size: int,
        seed: int,
        num_workers: int,
        prefetch_factor: int | None,
        pin_memory: bool,
    ) -> None:
        super().__init__(
            _Batches(state, collate, batch_size),
            batch_size=None,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor if num_workers > 0 else None,
            pin_memory=pin_memory,
            # Its own generator: iterating must not move the model's random numbers.
            generator=torch.Generator().manual_seed(seed),
        )
        self._state = state

    def epoch(self, epoch: int, skip: int = 0) -> Any:
        """The batches from where the stream is: it knows itself what is done."""
        del epoch, skip
        return iter(self)

    def __iter__(self) -> Any:
        batches = super().__iter__()
        while True:
            try:
                batch = next(batches)
            except RuntimeError as error:
                if not str(error).startswith("DataLoader worker"):
                    raise
                raise DataError(
                    "a process that loads streamed data died, most likely because memory ran out",
                    where="training.dataloader_num_workers",
                    fix="fewer of them, or a smaller block: data.streaming: 1000",
                ) from error
            if isinstance(batch, TrainkitError):
                raise batch
            self._state.take(batch.pop(NOTE))
            yield batch
