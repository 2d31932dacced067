"""Sources in, prepared data out: read, build, store, count, refuse."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from trainkit.data.build import cache
from trainkit.data.build.builder import SampleBuilder
from trainkit.data.build.datasets import Part, PreparedData
from trainkit.data.build.ledger import Entry, Ledger, read_ledger
from trainkit.data.build.mixing import Share, row_keys, stream_names
from trainkit.data.build.source import LEDGER, Progress, SourceStoreBuilder, relative_names
from trainkit.data.build.stops import EndsOfTurns
from trainkit.data.build.summary import (
    check_dropped,
    check_files,
    dropped_rows,
    listed_twice,
    plain,
    source_row,
    template_digest,
    totals,
    warnings_of,
)
from trainkit.data.options import DataOptions
from trainkit.data.read.finding import resolve_files, unread_files
from trainkit.data.read.hub import fetch, hub_name
from trainkit.data.read.opening import container
from trainkit.errors import DataError
from trainkit.options import Source
from trainkit.places import cache_of

__all__ = ["Progress", "prepare"]


def prepare(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
    *,
    ledger: Ledger,
    progress: Callable[[Progress], None] | None = None,
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
    directory = Path(options.cache_dir) if options.cache_dir else cache_of("data")
    preparation = _Preparation(tokenizer, options, directory, ledger, progress)
    labels = [source.label for source in sources]
    for source, stream in zip(
        sources, stream_names(labels, [source.path for source in sources]), strict=True
    ):
        preparation.add(source, stream)
    check_dropped(preparation.file_rows, options)
    return preparation.result()


class _Preparation:
    """The sources so far."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        options: DataOptions,
        directory: Path,
        ledger: Ledger,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self.tokenizer = tokenizer
        self.options = options
        self.directory = directory
        self.ledger = ledger
        self.progress = progress
        self.builder = SampleBuilder(tokenizer, options)
        self.tokenizer_sha256 = cache.tokenizer_digest(tokenizer)
        self.code_sha256 = cache.code_digest()
        self.parts: list[Part] = []
        self.file_rows: list[dict[str, Any]] = []
        self.cached: list[bool] = []
        self.entries: list[Entry] = []

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
        shas = [cache.sha256_of(file, self.directory / "sha256") for file in files]
        data = [("".join(container(f)), sha) for f, sha in zip(files, shas, strict=True)]
        stable = relative_names(source.path, files)
        if stable != [file.name for file in files] and not Path(source.path).expanduser().is_dir():
            stream += "/*"  # older versions drew by the names alone, so the order is another one
        drawn = (stream, stable)
        key = cache.store_key(
            source, drawn, data, self.tokenizer_sha256, self.options, self.code_sha256
        )
        work = SourceStoreBuilder(source, stream, files, self.builder, self.options, self.progress)
        store, was_there = cache.stored(self.directory, key, work.build)
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
        ends = EndsOfTurns(
            sum((Counter(m["ends"]) for m in meta), Counter()), self.tokenizer, self.options
        )
        stops = ends.stops(
            lambda index: sum(part.store.num_trained_of(index) for part in self.parts)
        )
        counts = Counter[str]()
        for m in meta:
            counts.update(m["counts"])
        twice = listed_twice(self.file_rows)
        summary = {
            "files": self.file_rows,
            "totals": totals(self.file_rows),
            "sources": [
                source_row(part, cached)
                for part, cached in zip(self.parts, self.cached, strict=True)
            ],
            "counts": {k: n for k, n in sorted(counts.items()) if not k.startswith("ignored:")},
            "dropped": dropped_rows(self.entries),
            "ends": dict(ends.counts),
            "end_of_turn": stops,
            "notes": sorted({note for m in meta for note in m["notes"]}),
            "warnings": [*twice, *warnings_of(ends, stops, counts)],
            "listed_twice": twice,
            "template_sha256": template_digest(self.tokenizer, self.options),
            "tokenizer_sha256": self.tokenizer_sha256,
            "options": plain(self.options.model_dump()),
        }
        return PreparedData(self.parts, summary, tuple(stops.values()))
