"""Sources in, prepared data out: read, build in worker processes, store, count, refuse."""

import ctypes
import gc
import itertools
import multiprocessing
import os
import signal
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from trainkit.data.build.builder import BuiltRows, SampleBuilder, entry_of
from trainkit.data.build.datasets import (
    Part,
    PreparedData,
    Share,
    choose_rows,
    row_keys,
    stream_names,
)
from trainkit.data.build.ledger import LEDGER, Entry, FileCounts, Ledger, read_ledger
from trainkit.data.build.store import (
    StoreWriter,
    code_digest,
    sha256_of,
    store_key,
    stored,
    tokenizer_digest,
)
from trainkit.data.build.summary import (
    check_dropped,
    check_files,
    dropped_rows,
    source_row,
    summary_of,
    totals,
)
from trainkit.data.options import DataOptions
from trainkit.data.read.finding import fetch, hub_name, resolve_files, unread_files
from trainkit.data.read.reading import RawRow, container, is_packed, read_rows
from trainkit.data.render.encode import threads_of_tokenizers
from trainkit.errors import DataError
from trainkit.options import Source
from trainkit.places import cache_of

Work = tuple[int, list[RawRow]]
"""The number of a file, and a run of its rows."""

Result = tuple[int, list[RawRow], BuiltRows]
"""The same, and what became of them."""

_PR_SET_PDEATHSIG = 1

_builder: SampleBuilder | None = None


def build_all(
    builder: SampleBuilder, work: Iterable[Work], source: Source, *, num_workers: int
) -> Iterator[Result]:
    """Build samples for all rows; results come in the order of the rows.

    Workers are forked, so the tokenizer is loaded once. They must be made before a process group
    or a CUDA context exists. At most three runs of rows per worker are under way at any time.

    Args:
        builder: used by every worker.
        work: runs of rows, read as they are needed.
        source: where the rows come from.
        num_workers: processes; 0 and 1 build in this one.

    Raises:
        DataError: a worker died, or found what concerns the whole run.
    """
    work = iter(work)
    if num_workers <= 1 or "fork" not in multiprocessing.get_all_start_methods():
        for file, rows in work:
            yield file, rows, builder.build(rows, source)
        return
    # The workers are the parallelism; the threads of a forked tokenizer may hang.
    with threads_of_tokenizers(False):
        # The first run is built here: the template's probes are then done for all workers, and a
        # small file needs none.
        for file, rows in itertools.islice(work, 1):
            yield file, rows, builder.build(rows, source)
        first = list(itertools.islice(work, 1))
        if not first:
            return
        pending: deque[tuple[int, list[RawRow], Future[BuiltRows]]] = deque()
        context = multiprocessing.get_context("fork")
        try:
            with ProcessPoolExecutor(num_workers, context, _start, (builder, os.getpid())) as pool:
                for file, rows in itertools.chain(first, work):
                    pending.append((file, rows, pool.submit(_build, rows, source)))
                    if len(pending) > 3 * num_workers:
                        number, done, future = pending.popleft()
                        yield number, done, future.result()
                for number, done, future in pending:
                    yield number, done, future.result()
        except BrokenProcessPool as error:
            raise DataError(
                "a tokenising process died, most likely because memory ran out",
                fix="lower data.num_workers or data.max_row_bytes",
            ) from error
        finally:
            for _, _, future in pending:
                future.cancel()


def _start(builder: SampleBuilder, parent: int) -> None:
    global _builder
    _builder = builder
    _die_with(parent)
    # Rows make many short-lived objects and no cycles: what the parent has loaded need not be
    # walked again and again (nor its pages be copied).
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def _die_with(parent: int) -> None:
    """Ask Linux to end this process when its parent is killed; end it if that was a moment ago.

    It would wait for work for ever, and hold the files that it has inherited.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _build(rows: list[RawRow], source: Source) -> BuiltRows:
    assert _builder is not None
    return _builder.build(rows, source)


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
class SourceStoreBuilder:
    """Builds the store of one source.

    Attributes:
        source: how its rows are read and chosen.
        stream: what its random numbers are drawn by.
        files: its files.
        builder: makes the samples.
        progress: called after every run of rows.
        counts: what became of the rows of each file.
    """

    source: Source
    stream: str
    files: Sequence[Path]
    builder: SampleBuilder
    progress: Callable[[Progress], None] | None
    counts: list[FileCounts] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.options = self.builder.options
        self.counts = [FileCounts() for _ in self.files]
        compressed = any(is_packed(file) for file in self.files)
        self._bytes_total = 0 if compressed else sum(file.stat().st_size for file in self.files)
        self._bytes_done = self._rows_done = 0

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
                    "files": [vars(row) for row in self.counts],
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
                counts.formats[name.removeprefix("format:")] += count
        for sample in built.samples:
            row = rows[sample.row]
            place = {"file": file, "line": row.line, "row": row.number, "part": sample.part}
            counts.trained_tokens += writer.append(sample.input_ids, sample.loss_mask, **place)
            counts.tokens += len(sample.input_ids)
        counts.samples += len(built.samples)

    def _enter(self, ledger: Ledger, file: int, rows: Sequence[RawRow], built: BuiltRows) -> None:
        counts = self.counts[file]
        for event in built.events:
            entry = entry_of(event, rows, self.files[file], self.options)
            ledger.add(replace(entry, file=str(file)))
            counts.reasons[event.reason] += 1
            if event.action != "repaired":
                reasons = counts.dropped_for if event.action == "dropped" else counts.cut_for
                reasons[event.reason] += 1
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


__all__ = ["Progress", "prepare"]


def prepare(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
    *,
    ledger: Ledger,
    progress: Callable[[Progress], None] | None = None,
    is_evaluation: bool = False,
) -> PreparedData:
    """Turn sources into samples, or open what an earlier call has made of the same.

    Call it before a process group or a CUDA context exists: it forks, and the processes of one
    machine wait for each other on a file lock.

    Args:
        sources: where rows come from.
        tokenizer: a fast one; with a chat template if there are conversations.
        options: how rows become samples.
        ledger: gets an entry for every row that is dropped, cut or repaired.
        progress: called now and then while samples are built.
        is_evaluation: what is drawn is drawn apart from training's sources of the same names.

    Raises:
        DataError: a source is missing, unreadable, empty, has nothing to train on, or more rows
            are dropped than ``max_dropped`` allows.
    """
    if not sources:
        raise DataError("no data is given", where="data.train", fix="name at least one file there")
    if all(source.weight == 0 for source in sources):
        raise DataError(
            "every source has weight 0, so there is nothing to train on",
            where=sources[0].path,
            fix="give one of them a weight above 0",
        )
    preparation = _Preparation(tokenizer, options, ledger, progress)
    labels, paths = [source.label for source in sources], [source.path for source in sources]
    for source, stream in zip(sources, stream_names(labels, paths), strict=True):
        preparation.add(source, f"eval/{stream}" if is_evaluation else stream)
    check_dropped(preparation.file_rows, options)
    return preparation.result()


@dataclass
class _Preparation:
    """The sources so far."""

    tokenizer: PreTrainedTokenizerBase
    options: DataOptions
    ledger: Ledger
    progress: Callable[[Progress], None] | None
    parts: list[Part] = field(default_factory=list)
    file_rows: list[dict[str, Any]] = field(default_factory=list)
    cached: list[bool] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)

    def __post_init__(self) -> None:
        options = self.options
        self.directory = Path(options.cache_dir) if options.cache_dir else cache_of("data")
        self.builder = SampleBuilder(self.tokenizer, options)
        self.tokenizer_sha256 = tokenizer_digest(self.tokenizer)
        self.code_sha256 = code_digest()

    def add(self, source: Source, stream: str) -> None:
        """Open or build the store of a source, whose random numbers are drawn by ``stream``."""
        hub = hub_name(source.path)
        if not hub and (source.subset or source.files):
            raise DataError(
                "subset and files choose within a data set of the hub, and this is a local path",
                where=source.path,
                fix="name the files themselves",
            )
        files = (
            [fetch(hub, source.split, self.directory / "hub", source.subset, source.files)]
            if hub
            else resolve_files(source.path)
        )
        names = (source.path,) if hub else tuple(str(file) for file in files)
        shas = [sha256_of(file, self.directory / "sha256") for file in files]
        data = [("".join(container(f)), sha) for f, sha in zip(files, shas, strict=True)]
        stable = relative_names(source.path, files)
        if stable != [file.name for file in files] and not Path(source.path).expanduser().is_dir():
            stream += "/*"  # older versions drew by the names alone, so the order is another one
        drawn = (stream, stable)
        key = store_key(source, drawn, data, self.tokenizer_sha256, self.options, self.code_sha256)
        work = SourceStoreBuilder(source, stream, files, self.builder, self.progress)
        store, was_there = stored(self.directory, key, work.build)
        self.cached.append(was_there)
        entries = [
            replace(entry, file=names[int(entry.file)])
            for entry in read_ledger(store.directory / LEDGER)
        ]
        self.entries += entries
        for entry in entries:
            self.ledger.add(entry)
        self.ledger.flush()
        rows = [
            {
                "path": name,
                "source": source.label,
                "sha256": sha,
                "bytes": file.stat().st_size,
                **counts,
            }
            for name, sha, file, counts in zip(names, shas, files, store.meta["files"], strict=True)
        ]
        check_files(rows, entries, files, str(self.tokenizer.name_or_path))
        self.file_rows += rows
        skipped = () if hub else unread_files(source.path)
        keys = row_keys(stable, store.file, store.row, store.part)
        share = Share(keys, stream, source.weight, source.epochs)
        self.parts.append(Part(source, store, names, tuple(files), share, tuple(map(str, skipped))))

    def result(self) -> PreparedData:
        """All of it, with its summary."""
        meta = [part.store.meta for part in self.parts]
        summary = summary_of(
            self.tokenizer,
            self.options,
            files=self.file_rows,
            sources=[source_row(*each) for each in zip(self.parts, self.cached, strict=True)],
            counts=sum((Counter(m["counts"]) for m in meta), Counter()),
            ends=sum((Counter(m["ends"]) for m in meta), Counter()),
            notes=(note for m in meta for note in m["notes"]),
            num_trained_of=lambda index: sum(p.store.num_trained_of(index) for p in self.parts),
        )
        summary |= {"totals": totals(self.file_rows), "dropped": dropped_rows(self.entries)}
        return PreparedData(self.parts, summary)
