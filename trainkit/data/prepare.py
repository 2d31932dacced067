"""Sources in, prepared data out: read, build, store, count, refuse."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from trainkit.data import cache
from trainkit.data.builder import Batch, SampleBuilder
from trainkit.data.ledger import Entry, Ledger, read_ledger
from trainkit.data.mixing import Share, choose_rows, row_keys
from trainkit.data.options import DataOptions, Source
from trainkit.data.prepared import Part, PreparedData
from trainkit.data.reading import RawRow, read_rows, resolve_files
from trainkit.data.store import Store, StoreWriter
from trainkit.data.workers import Work, build_all
from trainkit.errors import DataError

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
    formats: dict[str, int] = field(default_factory=dict)


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
    directory = Path(options.cache_dir) if options.cache_dir else cache.default_directory()
    builder = SampleBuilder(tokenizer, options)
    digests = (cache.tokenizer_digest(tokenizer), cache.code_digest())
    parts: list[Part] = []
    file_rows: list[dict[str, Any]] = []
    cached: list[bool] = []
    for source in map(_named, sources):
        files = resolve_files(source.path)
        shas = [cache.sha256_of(file, directory / "sha256") for file in files]
        suffixes = ["".join(file.suffixes[-2:]) for file in files]
        key = cache.store_key(
            source, list(zip(suffixes, shas, strict=True)), digests[0], options, digests[1]
        )
        work = _SourceWork(source, files, shas, builder, options, progress)
        store, was_there = cache.stored(directory, key, work.build)
        cached.append(was_there)
        names = tuple(str(file) for file in files)
        for entry in read_ledger(store.directory / LEDGER):
            ledger.add(replace(entry, file=names[int(entry.file)]))
        ledger.flush()
        rows = [
            {
                "path": name,
                "source": source.name,
                "sha256": sha,
                "bytes": file.stat().st_size,
                **counts,
            }
            for name, sha, file, counts in zip(names, shas, files, store.meta["files"], strict=True)
        ]
        _check_files(rows, options)
        file_rows += rows
        parts.append(_part(source, store, names, files))
    _check_dropped(file_rows, options)
    meta = [part.store.meta for part in parts]
    ends = sorted({end for m in meta for end in m["ends"]})
    counts = Counter[str]()
    for m in meta:
        counts.update(m["counts"])
    eot_ids = [int(tokenizer.convert_tokens_to_ids(end)) for end in ends]
    summary = {
        "files": file_rows,
        "totals": _totals(file_rows),
        "sources": [
            _source_row(part, store_cached)
            for part, store_cached in zip(parts, cached, strict=True)
        ],
        "counts": dict(sorted(counts.items())),
        "end_of_turn": dict(zip(ends, eot_ids, strict=True)),
        "notes": sorted({note for m in meta for note in m["notes"]}),
        "warnings": _warnings(tokenizer, options, ends, counts),
        "template_sha256": _template_digest(tokenizer, options),
        "tokenizer_sha256": digests[0],
        "options": _plain(asdict(options)),
    }
    return PreparedData(parts, summary, eot_ids)


class _SourceWork:
    """Builds the store of one source."""

    def __init__(
        self,
        source: Source,
        files: Sequence[Path],
        shas: Sequence[str],
        builder: SampleBuilder,
        options: DataOptions,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self.source = source
        self.files = files
        self.builder = builder
        self.options = options
        self.progress = progress
        self.counts = [FileCounts() for _ in files]
        self._bytes_done = 0
        compressed = any(file.suffix in (".gz", ".zst", ".parquet") for file in files)
        self._bytes_total = 0 if compressed else sum(file.stat().st_size for file in files)
        self._rows_done = 0

    def build(self, directory: Path) -> None:
        """Fill an empty directory with the source's store."""
        ends: set[str] = set()
        notes: set[str] = set()
        counts: Counter[str] = Counter()
        ledger = Ledger(directory / LEDGER)
        results = build_all(
            self.builder, self._work(), self.source, num_workers=self.options.num_workers
        )
        with StoreWriter(directory) as writer:
            for file, rows, batch in results:
                self._write(writer, file, rows, batch)
                self._enter(ledger, file, rows, batch)
                ends |= batch.ends
                notes |= batch.notes
                counts.update(batch.counts)
                self._report(rows)
            ledger.close()
            writer.finish(
                {
                    "files": [asdict(row) for row in self.counts],
                    "ends": sorted(ends),
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
        mask = choose_rows(
            keys, self.source.max_samples, seed=self.options.seed, name=self.source.name
        )
        return np.split(mask, np.cumsum(sizes)[:-1])

    def _write(self, writer: StoreWriter, file: int, rows: Sequence[RawRow], batch: Batch) -> None:
        counts = self.counts[file]
        counts.rows += len(rows)
        counts.kept += batch.num_kept
        for name, count in batch.counts.items():
            if name.startswith("format:"):
                form = name.removeprefix("format:")
                counts.formats[form] = counts.formats.get(form, 0) + count
        if not batch.lengths:
            return
        (ids,), (mask,) = batch.input_ids, batch.loss_mask
        start = 0
        for length, number, part in zip(batch.lengths, batch.rows, batch.parts, strict=True):
            end = start + length
            row = rows[number]
            place = {"file": file, "line": row.line, "row": row.number, "part": part}
            writer.append(ids[start:end], mask[start:end], **place)
            counts.trained_tokens += int(np.count_nonzero(mask[start + 1 : end]))
            start = end
        counts.samples += len(batch.lengths)
        counts.tokens += len(ids)

    def _enter(self, ledger: Ledger, file: int, rows: Sequence[RawRow], batch: Batch) -> None:
        counts = self.counts[file]
        for event in batch.events:
            details = asdict(event)
            line = rows[details.pop("row")].line
            if event.reason == "too_long" and self.options.truncation == "error":
                raise DataError(
                    f"the row has {event.detail}",
                    where=f"{self.files[file]}:{line}",
                    fix="raise data.max_length, or choose another data.truncation",
                )
            ledger.add(Entry(file=str(file), line=line, **details))
            counts.reasons[event.reason] = counts.reasons.get(event.reason, 0) + 1
            counts.tokens_lost += event.tokens
            counts.trained_tokens_lost += event.trained_tokens
            counts.repaired += event.action == "repaired"
            counts.cut += event.action == "cut"
        counts.dropped += len(rows) - batch.num_kept

    def _report(self, rows: Sequence[RawRow]) -> None:
        self._rows_done += len(rows)
        self._bytes_done += sum(len(row.payload) for row in rows if isinstance(row.payload, bytes))
        if self.progress is not None:
            done = min(self._bytes_done, self._bytes_total) if self._bytes_total else 0
            self.progress(Progress(self.source.name, self._rows_done, done, self._bytes_total))


def relative_names(path: str, files: Sequence[Path]) -> list[str]:
    """Names of files that do not depend on where the data lies."""
    root = Path(path).expanduser()
    return [str(file.relative_to(root)) if root.is_dir() else file.name for file in files]


def _named(source: Source) -> Source:
    """The source with its ``#count`` taken off its path, and a name."""
    match = re.fullmatch(r"(.+)#(\d+)", source.path)
    if match and not Path(source.path).exists():
        if source.max_samples is not None:
            raise DataError("both '#' and max_samples are given", where=source.path)
        source = replace(source, path=match[1], max_samples=int(match[2]))
    return source if source.name else replace(source, name=Path(source.path).name.split(".")[0])


def _part(source: Source, store: Store, names: tuple[str, ...], files: Sequence[Path]) -> Part:
    stable = relative_names(source.path, files)
    keys = row_keys(stable, store.file, store.row, store.part)
    return Part(source.name, store, names, Share(keys, source.name, source.weight, source.epochs))


def _check_files(rows: Sequence[dict[str, Any]], options: DataOptions) -> None:
    for row in rows:
        reasons = ", ".join(f"{reason}: {n}" for reason, n in row["reasons"].items())
        if row["rows"] == 0 and row["not_chosen"] == 0:
            raise DataError(
                "the file holds no rows", where=row["path"], fix="check how it was made"
            )
        if row["rows"] and row["trained_tokens"] == 0:
            raise DataError(
                f"no token of this file would be trained ({row['rows']} rows; {reasons})",
                where=row["path"],
                fix="look at its rows with: trainkit data preview --data FILE --model MODEL",
            )


def _check_dropped(rows: Sequence[dict[str, Any]], options: DataOptions) -> None:
    limit = options.max_dropped
    if limit is None:
        return
    dropped = sum(row["dropped"] for row in rows)
    total = sum(row["rows"] for row in rows)
    allowed = limit if isinstance(limit, int) else limit * total
    if dropped > allowed:
        worst = max(rows, key=lambda row: row["dropped"])
        reasons = ", ".join(f"{reason}: {n}" for reason, n in worst["reasons"].items())
        raise DataError(
            f"{dropped} of {total} rows were dropped, more than max_dropped {limit} "
            f"(most in this file: {reasons})",
            where=worst["path"],
            fix="mend the rows that dropped.jsonl names, or raise data.max_dropped",
        )


def _totals(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    keys = [key for key, value in asdict(FileCounts()).items() if isinstance(value, int)]
    return {key: sum(row[key] for row in rows) for key in keys}


def _source_row(part: Part, cached: bool) -> dict[str, Any]:
    return {
        "name": part.name,
        "samples": len(part.store),
        "weight": part.share.weight,
        "epochs": part.share.epochs,
        "cached": cached,
    }


def _warnings(
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
    ends: Sequence[str],
    counts: Counter[str],
) -> list[str]:
    stops = {*options.stop_token_ids, tokenizer.eos_token_id}
    warnings = [
        f"the trained end-of-turn token {end!r} is not a stop token of this model; generation will "
        "not stop at it unless its id is in generation_config.eos_token_id (trainkit writes it "
        "there)"
        for end in ends
        if tokenizer.convert_tokens_to_ids(end) not in stops
    ]
    if counts["turns_without_end"]:
        warnings.append(
            f"{counts['turns_without_end']} trained turns have no end-of-turn token, so the model "
            "may not learn to stop; append_eos: true puts the tokenizer's eos there"
        )
    if counts["turns_not_trained_for_stripped_thinking"]:
        warnings.append(
            f"{counts['turns_not_trained_for_stripped_thinking']} turns are not trained because "
            "the template strips their thinking; thinking: split trains each with its own history"
        )
    return warnings


def _template_digest(tokenizer: PreTrainedTokenizerBase, options: DataOptions) -> str:
    template = options.chat_template or tokenizer.chat_template
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(values, default=list))
