"""Sources in, prepared data out: read, build in worker processes, store, count, refuse."""

import ctypes
import gc
import hashlib
import itertools
import multiprocessing
import os
import signal
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from trainkit.data.builder import BuiltRows, SampleBuilder, entry_of
from trainkit.data.datasets import (
    Part,
    PreparedData,
    Share,
    choose_rows,
    row_keys,
    stream_names,
    without_copies,
)
from trainkit.data.encode import threads_of_tokenizers
from trainkit.data.files import (
    RawRow,
    container,
    fetch,
    hub_name,
    is_packed,
    read_rows,
    resolve_files,
    unread_files,
)
from trainkit.data.options import DataOptions
from trainkit.data.store import (
    LEDGER,
    LEFT_OUT,
    Entry,
    FileCounts,
    Ledger,
    StoreWriter,
    code_digest,
    read_ledger,
    store_key,
    stored,
    tokenizer_digest,
)
from trainkit.data.summary import (
    check_dropped,
    check_files,
    dropped_rows,
    ignored_fields,
    summary_of,
)
from trainkit.data.vision import NoVision, Vision
from trainkit.digests import remembered_digest
from trainkit.errors import DataError, RecipeError
from trainkit.options import Source
from trainkit.options.data import ROW_FORMATS
from trainkit.options.training import OBJECTIVE_FORMATS
from trainkit.places import cache_of

Work = tuple[int, list[RawRow]]
"""The number of a file, and a run of its rows."""

Result = tuple[int, list[RawRow], BuiltRows]
"""The same, and what became of them."""

_PR_SET_PDEATHSIG = 1

_builder: SampleBuilder | None = None


def formats_taken(only: str | None) -> set[str]:
    """The formats that an objective takes: its only one, or those that are no other's alone."""
    return {only} if only else ROW_FORMATS.keys() - OBJECTIVE_FORMATS.values()


def sources_of(objective: str, only: str | None, sources: Iterable[Source]) -> tuple[Source, ...]:
    """Sources with the formats an objective takes; ``auto`` is its only one, if it has only one."""
    taken = formats_taken(only)
    found = []
    for source in sources:
        format = only if only and source.format == "auto" else source.format
        found.append(source.replace(format=format))
        if format not in taken | {"auto"}:
            raise RecipeError(
                f"{objective} cannot train on rows of the format {format}",
                where=f"data.format: {source.path}",
                fix=f"it takes {', '.join(sorted(taken))}",
            )
    return tuple(found)


def build_all(
    builder: SampleBuilder,
    work: Iterable[Work],
    source: Source,
    folders: Sequence[Path],
    *,
    num_workers: int,
) -> Iterator[Result]:
    """Build samples for all rows; results come in the order of the rows.

    Workers are forked, so the tokenizer is loaded once. They must be made before a process group
    or a CUDA context exists. At most three runs of rows per worker are under way at any time.
    """
    work = iter(work)
    if num_workers <= 1 or "fork" not in multiprocessing.get_all_start_methods():
        for file, rows in work:
            yield file, rows, builder.build(rows, source, folders[file])
        return
    # The workers are the parallelism; the threads of a forked tokenizer may hang.
    with threads_of_tokenizers(False):
        # The first run is built here: the template's probes are then done for all workers, and a
        # small file needs none.
        for file, rows in itertools.islice(work, 1):
            yield file, rows, builder.build(rows, source, folders[file])
        first = list(itertools.islice(work, 1))
        if not first:
            return
        pending: deque[tuple[int, list[RawRow], Future[BuiltRows]]] = deque()
        context = multiprocessing.get_context("fork")
        try:
            with ProcessPoolExecutor(num_workers, context, _start, (builder, os.getpid())) as pool:
                for file, rows in itertools.chain(first, work):
                    done = pool.submit(_build, rows, source, folders[file])
                    pending.append((file, rows, done))
                    if len(pending) > 3 * num_workers:
                        number, built, future = pending.popleft()
                        yield number, built, future.result()
                for number, built, future in pending:
                    yield number, built, future.result()
        except BrokenProcessPool as error:
            raise DataError(
                "a tokenising process died, most likely because memory ran out",
                fix="lower data.num_workers",
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


def _build(rows: list[RawRow], source: Source, folder: Path) -> BuiltRows:
    assert _builder is not None
    return _builder.build(rows, source, folder)


ROWS_PER_RUN = 256
BYTES_PER_RUN = 1 << 20


@dataclass(frozen=True)
class Progress:
    """How far the preparation of one source is.

    Attributes:
        bytes_done, bytes_total: of the files; the total is 0 where it is not known.
    """

    source: str
    rows: int
    bytes_done: int
    bytes_total: int


def build_store(
    directory: Path,
    source: Source,
    stream: str,
    files: Sequence[Path],
    builder: SampleBuilder,
    progress: Callable[[Progress], None] | None,
) -> None:
    options = builder.options
    of_files = [FileCounts() for _ in files]
    of_samples = [hashlib.sha256() for _ in files]
    all_ends: Counter[str] = Counter()
    all_counts: Counter[str] = Counter()
    notes: set[str] = set()
    packed = any(is_packed(file) for file in files)
    bytes_total = 0 if packed else sum(file.stat().st_size for file in files)
    rows_done = bytes_done = 0
    ledger = Ledger(directory / LEDGER)
    work = _work(source, stream, files, options, of_files)
    folders = [file.absolute().parent for file in files]
    results = build_all(builder, work, source, folders, num_workers=options.num_workers)
    with StoreWriter(directory) as writer:
        for file, rows, built in results:
            counts, kept = of_files[file], built.num_kept
            counts.rows += len(rows)
            counts.kept += kept
            counts.left_out += built.num_left_out
            counts.dropped += len(rows) - kept - built.num_left_out
            counts.samples += len(built.samples)
            for name, count in built.counts.items():
                if name.startswith("format:"):
                    counts.formats[name.removeprefix("format:")] += count
            writer.images.note(built.unread)
            for number, part, ids, mask, images in built.samples:
                row = rows[number]
                of_samples[file].update(ids.tobytes() + repr([i.digest for i in images]).encode())
                place = {"file": file, "line": row.line, "row": row.number, "part": part}
                counts.trained_tokens += writer.append(ids, mask, images, **place)
                counts.tokens += len(ids)
                counts.images += len(images)
                counts.image_tokens += sum(image.num_tokens for image in images)
            for event in built.events:
                entry = entry_of(event, rows, files[file], options)
                ledger.add(replace(entry, file=str(file)))
                counts.reasons[event.reason] += 1
                if event.action != "repaired":
                    reasons = counts.dropped_for if event.action == "dropped" else counts.cut_for
                    reasons[event.reason] += 1
                if event.reason not in LEFT_OUT:
                    counts.tokens_lost += event.tokens
                    counts.trained_tokens_lost += event.trained_tokens
            counts.cut += len({event.row for event in built.events if event.action == "cut"})
            counts.repaired += len({e.row for e in built.events if e.action == "repaired"})
            all_ends.update(built.ends)
            all_counts.update(built.counts)
            notes |= built.notes
            rows_done += len(rows)
            bytes_done += sum(len(row.payload) for row in rows if isinstance(row.payload, bytes))
            if progress is not None:
                done = min(bytes_done, bytes_total)
                progress(Progress(source.label, rows_done, done, bytes_total))
        ledger.close()
        found = {k: v for k, v in all_counts.items() if not k.startswith("format:")}
        meta = {"ends": dict(sorted(all_ends.items())), "counts": found, "notes": sorted(notes)}
        for counts, digest in zip(of_files, of_samples, strict=True):
            counts.samples_sha256 = digest.hexdigest() if counts.samples else None
        writer.finish({"files": [vars(each) for each in of_files], **meta})


def _work(
    source: Source,
    stream: str,
    files: Sequence[Path],
    options: DataOptions,
    counts: Sequence[FileCounts],
) -> Iterator[Work]:
    """The rows of all files in runs, those that ``max_samples`` chooses."""
    chosen = None
    if source.max_samples is not None:
        sizes = [sum(1 for _ in read_rows(file)) for file in files]
        file_of = np.repeat(np.arange(len(sizes)), sizes)
        row_of = np.concatenate([np.arange(size) for size in sizes])
        names = relative_names(source.path, files)
        keys = row_keys(names, file_of, row_of, np.zeros_like(row_of))
        mask = choose_rows(keys, source.max_samples, seed=options.seed, name=stream)
        chosen = np.split(mask, np.cumsum(sizes)[:-1])
    for number, file in enumerate(files):
        run: list[RawRow] = []
        size = 0
        for row in read_rows(file):
            if chosen is not None and not chosen[number][row.number]:
                counts[number].not_chosen += 1
                continue
            run.append(row)
            size += len(row.payload) if isinstance(row.payload, bytes) else 1000
            if len(run) >= ROWS_PER_RUN or size >= BYTES_PER_RUN:
                yield number, run
                run, size = [], 0
        if run:
            yield number, run


def relative_names(path: str, files: Sequence[Path]) -> list[str]:
    """Names of files that do not depend on where the data lies, and that no two of them share."""
    root = Path(path).expanduser()
    if root.is_dir():
        return [str(file.relative_to(root)) for file in files]
    names = [file.name for file in files]
    if len(set(names)) < len(names):  # of a glob over folders
        names = [os.path.relpath(file, os.path.commonpath(files)) for file in files]
    return names


def prepare(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
    *,
    ledger: Ledger,
    progress: Callable[[Progress], None] | None = None,
    is_evaluation: bool = False,
    vision: Vision | NoVision | None = None,
    seen: set[bytes] | None = None,
) -> PreparedData:
    """Turn sources into samples, or open what an earlier call has made of the same.

    Call it before a process group or a CUDA context exists: it forks, and the processes of one
    machine wait for each other on a file lock.

    ``ledger`` gets an entry for every row that is dropped, cut or repaired. What is drawn for an
    evaluation is drawn apart from training's sources of the same names. ``seen`` are the rows of
    earlier calls, which ``deduplicate`` leaves out here; this call's are added.
    """
    builder = SampleBuilder(tokenizer, options, vision)
    digests = tokenizer_digest(tokenizer), code_digest()
    seen = set() if seen is None else seen
    parts: list[Part] = []
    cached: list[bool] = []
    rows, entries = list[dict[str, Any]](), list[Entry]()
    labels, paths = [source.label for source in sources], [source.path for source in sources]
    for source, stream in zip(sources, stream_names(labels, paths), strict=True):
        drawn_by = f"eval/{stream}" if is_evaluation else stream
        part, was_there, mine = _open_part(source, drawn_by, builder, digests, progress)
        check_files(part, mine, str(tokenizer.name_or_path))
        if options.deduplicate:
            part, copies = without_copies(part, seen)
            mine += copies
        for entry in mine:
            ledger.add(entry)
        ledger.flush()
        parts.append(part)
        cached.append(was_there)
        rows += part.rows
        entries += mine
    if not sum(map(len, parts)):
        raise DataError(
            "every row is a copy of a trained one",
            where="data.deduplicate",
            fix="give other rows to evaluate, or a share of the training data: data.eval: 2%",
        )
    check_dropped(rows, options)
    meta = [part.store.meta for part in parts]
    summary = summary_of(
        tokenizer,
        options,
        files=rows,
        sources=[
            {
                "name": part.name,
                "samples": len(part),
                "weight": part.share.weight,
                "epochs": part.share.epochs,
                "cached": was_there,
                "ignored_fields": ignored_fields(part.store.meta["counts"]),
                "not_read": list(part.not_read),
            }
            for part, was_there in zip(parts, cached, strict=True)
        ],
        counts=sum((Counter(m["counts"]) for m in meta), Counter()),
        ends=sum((Counter(m["ends"]) for m in meta), Counter()),
        notes=(note for m in meta for note in m["notes"]),
        num_trained_of=lambda index: sum(part.store.num_trained_of(index) for part in parts),
    )
    summary |= {"totals": _totals(rows), "dropped": dropped_rows(entries)}
    reads = vision if summary["totals"]["images"] else None
    summary |= {"vision": reads.digest} if isinstance(reads, Vision) else {}
    return PreparedData(parts, summary)


def _totals(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    keys = [key for key, value in vars(FileCounts()).items() if isinstance(value, int)]
    return {key: sum(row[key] for row in rows) for key in keys}


def _open_part(
    source: Source,
    stream: str,
    builder: SampleBuilder,
    digests: tuple[str, str],
    progress: Callable[[Progress], None] | None,
) -> tuple[Part, bool, list[Entry]]:
    """A source's samples, made or from the cache; whether they were there; its ledger."""
    hub, options = hub_name(source.path), builder.options
    if not hub and (source.subset or source.files):
        raise DataError(
            "subset and files choose within a data set of the hub, and this is a local path",
            where=source.path,
            fix="name the files themselves",
        )
    directory = Path(options.cache_dir) if options.cache_dir else cache_of("data")
    if hub:
        files = [fetch(hub, source.split, directory / "hub", source.subset, source.files)]
    else:
        files = resolve_files(source.path)
    names = (source.path,) if hub else tuple(str(file) for file in files)
    shas = [remembered_digest(file, hashlib.sha256, directory / "sha256") for file in files]
    data = [("".join(container(file)), sha) for file, sha in zip(files, shas, strict=True)]
    stable = relative_names(source.path, files)
    # A relative path of an image in a row is another one next to another file.
    seen, folder = builder.vision, Path(options.images.folder or "").absolute()
    places = (str(folder), *(str(file.absolute().parent) for file in files))
    vision = () if seen is None else (seen.digest, *places)
    key = store_key(source, (stream, stable), data, digests[0], options, digests[1], vision)
    store, was_there = stored(
        directory, key, lambda new: build_store(new, source, stream, files, builder, progress)
    )
    entries = [
        replace(entry, file=names[int(entry.file)])
        for entry in read_ledger(store.directory / LEDGER)
    ]
    rows = [
        {"path": name, "source": source.label, "sha256": sha, "bytes": size, **counts}
        for name, sha, size, counts in zip(
            names, shas, [file.stat().st_size for file in files], store.meta["files"], strict=True
        )
    ]
    skipped = () if hub else tuple(map(str, unread_files(source.path)))
    keys = row_keys(stable, store.file, store.row, store.part)
    share = Share(keys, stream, source.weight, source.epochs)
    return Part(source, store, names, tuple(files), share, skipped, rows), was_there, entries
