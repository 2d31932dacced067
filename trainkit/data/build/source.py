"""Builds the store of one source: reads, builds, writes, counts."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from trainkit.data.build.builder import BuiltRows, SampleBuilder
from trainkit.data.build.ledger import Entry, Ledger
from trainkit.data.build.mixing import choose_rows, row_keys
from trainkit.data.build.store import StoreWriter
from trainkit.data.build.workers import Work, build_all
from trainkit.data.options import DataOptions
from trainkit.data.read.opening import is_packed
from trainkit.data.read.reading import RawRow, read_rows
from trainkit.errors import DataError
from trainkit.options import Source

LEDGER = "dropped.jsonl"

ROWS_PER_RUN = 256
BYTES_PER_RUN = 1 << 20


@dataclass(frozen=True)
class Progress:
    """How far the preparation of one source is.

    Attributes:
        source: its name.
        rows: rows done.
        bytes_done, bytes_total: of the files; the total is 0 where it is not known.
    """

    source: str
    rows: int
    bytes_done: int
    bytes_total: int


@dataclass
class FileCounts:
    """What became of the rows of one file."""

    rows: int = 0
    kept: int = 0
    dropped: int = 0
    cut: int = 0
    repaired: int = 0
    not_chosen: int = 0
    samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    tokens_lost: int = 0
    trained_tokens_lost: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    dropped_for: dict[str, int] = field(default_factory=dict)
    cut_for: dict[str, int] = field(default_factory=dict)
    formats: dict[str, int] = field(default_factory=dict)


class SourceStoreBuilder:
    """Builds the store of one source.

    Args:
        source: how its rows are read and chosen.
        stream: what its random numbers are drawn by.
        files: its files.
        builder: makes the samples.
        options: the reading limits and the truncation policy are read.
        progress: called after every run of rows.
    """

    def __init__(
        self,
        source: Source,
        stream: str,
        files: Sequence[Path],
        builder: SampleBuilder,
        options: DataOptions,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self.source = source
        self.stream = stream
        self.files = files
        self.builder = builder
        self.options = options
        self.progress = progress
        self.counts = [FileCounts() for _ in files]
        self._bytes_done = 0
        compressed = any(is_packed(file) for file in files)
        self._bytes_total = 0 if compressed else sum(file.stat().st_size for file in files)
        self._rows_done = 0

    def build(self, directory: Path) -> None:
        """Fill an empty directory with the source's store."""
        ends: Counter[str] = Counter()
        notes: set[str] = set()
        counts: Counter[str] = Counter()
        ledger = Ledger(directory / LEDGER)
        results = build_all(
            self.builder, self._work(), self.source, num_workers=self.options.num_workers
        )
        with StoreWriter(directory) as writer:
            for file, rows, built in results:
                self._write(writer, file, rows, built)
                self._enter(ledger, file, rows, built)
                ends.update(built.ends)
                notes |= built.notes
                counts.update(built.counts)
                self._report(rows)
            ledger.close()
            writer.finish(
                {
                    "files": [asdict(row) for row in self.counts],
                    "ends": dict(sorted(ends.items())),
                    "counts": {k: v for k, v in counts.items() if not k.startswith("format:")},
                    "notes": sorted(notes),
                }
            )

    def _work(self) -> Iterator[Work]:
        chosen = self._chosen()
        for number, file in enumerate(self.files):
            run: list[RawRow] = []
            size = 0
            for row in read_rows(file, max_row_bytes=self.options.max_row_bytes):
                if chosen is not None and not chosen[number][row.number]:
                    self.counts[number].not_chosen += 1
                    continue
                run.append(row)
                size += len(row.payload) if isinstance(row.payload, bytes) else 1000
                if len(run) >= ROWS_PER_RUN or size >= BYTES_PER_RUN:
                    yield number, run
                    run, size = [], 0
            if run:
                yield number, run

    def _chosen(self) -> list[np.ndarray] | None:
        """For each file, which of its rows ``max_samples`` chooses; None takes all."""
        if self.source.max_samples is None:
            return None
        limit = self.options.max_row_bytes
        sizes = [sum(1 for _ in read_rows(file, max_row_bytes=limit)) for file in self.files]
        file = np.repeat(np.arange(len(sizes)), sizes)
        row = np.concatenate([np.arange(size) for size in sizes])
        names = relative_names(self.source.path, self.files)
        keys = row_keys(names, file, row, np.zeros_like(row))
        mask = choose_rows(keys, self.source.max_samples, seed=self.options.seed, name=self.stream)
        return np.split(mask, np.cumsum(sizes)[:-1])

    def _write(
        self, writer: StoreWriter, file: int, rows: Sequence[RawRow], built: BuiltRows
    ) -> None:
        counts = self.counts[file]
        counts.rows += len(rows)
        counts.kept += built.num_kept
        for name, count in built.counts.items():
            if name.startswith("format:"):
                form = name.removeprefix("format:")
                counts.formats[form] = counts.formats.get(form, 0) + count
        if not built.lengths:
            return
        (ids,), (mask,) = built.input_ids, built.loss_mask
        start = 0
        for length, number, part in zip(built.lengths, built.rows, built.parts, strict=True):
            end = start + length
            row = rows[number]
            place = {"file": file, "line": row.line, "row": row.number, "part": part}
            writer.append(ids[start:end], mask[start:end], **place)
            counts.trained_tokens += int(np.count_nonzero(mask[start + 1 : end]))
            start = end
        counts.samples += len(built.lengths)
        counts.tokens += len(ids)

    def _enter(self, ledger: Ledger, file: int, rows: Sequence[RawRow], built: BuiltRows) -> None:
        counts = self.counts[file]
        for event in built.events:
            details = asdict(event)
            line = rows[details.pop("row")].line
            if event.reason == "too_long" and self.options.truncation == "error":
                raise DataError(
                    f"the row has {event.detail}",
                    where=f"{self.files[file]}:{line}",
                    fix="raise data.max_length, or choose another data.truncation",
                )
            ledger.add(Entry(file=str(file), line=line, **details))
            actions = {"dropped": counts.dropped_for, "cut": counts.cut_for}
            for reasons in (counts.reasons, actions.get(event.action)):
                if reasons is not None:
                    reasons[event.reason] = reasons.get(event.reason, 0) + 1
            counts.tokens_lost += event.tokens
            counts.trained_tokens_lost += event.trained_tokens
        counts.dropped += len(rows) - built.num_kept
        counts.cut += len({event.row for event in built.events if event.action == "cut"})
        counts.repaired += len({event.row for event in built.events if event.action == "repaired"})

    def _report(self, rows: Sequence[RawRow]) -> None:
        self._rows_done += len(rows)
        self._bytes_done += sum(len(row.payload) for row in rows if isinstance(row.payload, bytes))
        if self.progress is not None:
            done = min(self._bytes_done, self._bytes_total) if self._bytes_total else 0
            self.progress(Progress(self.source.label, self._rows_done, done, self._bytes_total))


def relative_names(path: str, files: Sequence[Path]) -> list[str]:
    """Names of files that do not depend on where the data lies, and that no two of them share."""
    root = Path(path).expanduser()
    if root.is_dir():
        return [str(file.relative_to(root)) for file in files]
    names = [file.name for file in files]
    if len(set(names)) < len(names):  # of a glob over folders
        names = [os.path.relpath(file, os.path.commonpath(files)) for file in files]
    return names
