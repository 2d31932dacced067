"""Containers: files in, numbered rows out.

A row is the bytes of one JSON value, or an already decoded object (csv, parquet). Lines are counted
from 1 as an editor counts them; a JSON array's rows carry the line their value starts on; csv and
parquet rows are numbered from 1. Memory stays flat: nothing is read whole but a single row.
"""

import bz2
import codecs
import csv
import glob
import gzip
import io
import json
import lzma
import os
import re
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any

from trainkit.errors import DataError
from trainkit.hub import check_hub
from trainkit.places import local_path, regular

SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".parquet")
TEXT = ".txt"
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
CHUNK_BYTES = 1 << 20
LONGEST_ROW = 64 * 2**20
"""Longer rows are dropped without being parsed."""

UNREADABLE: Mapping[str, str] = {
    **dict.fromkeys((".zip", ".tar", ".tgz", ".7z", ".rar"), "unpack the archive"),
    **dict.fromkeys((".lz4", ".br", ".sz", ".snappy", ".lzma"), "decompress it, or use .gz"),
    **dict.fromkeys((".arrow", ".feather", ".orc", ".avro"), "write it as parquet"),
    **dict.fromkeys((".xlsx", ".xls", ".ods", ".tsv"), "write it as csv"),
    **dict.fromkeys((".pkl", ".pickle", ".pt", ".bin", ".npy", ".npz"), "write it as JSON lines"),
    **dict.fromkeys((".md", ".rst", ".tex", ".html"), "rename it to .txt: every token is trained"),
    **dict.fromkeys((".pdf", ".docx", ".epub"), "write its text into a .txt file"),
    **dict.fromkeys((".db", ".sqlite", ".sqlite3", ".yaml", ".yml"), "write it as JSON lines"),
}
"""Files that hold no rows that could be read, by their suffix, and what to do."""

DAMAGED = (OSError, zlib.error, lzma.LZMAError)
"""What reading a damaged file raises, besides EOFError for one that was cut."""

MARKS: Mapping[bytes, str] = {
    b"\x1f\x8b": "gzip (.gz)",
    b"BZh": "bzip2 (.bz2)",
    b"\xfd7zXZ\x00": "xz (.xz)",
    b"\x28\xb5\x2f\xfd": "zstd (.zst)",
    b"PK\x03\x04": "a zip archive",
    b"PAR1": "parquet (.parquet)",
    b"7z\xbc\xaf": "a 7z archive",
    b"ARROW1": "Arrow (.arrow)",
    b"SQLite format 3": "an SQLite database",
}
"""The first bytes of files that are not text, and what they are."""

_AGAIN = "copy or download it again, or name it as what it is"


def container(file: Path) -> tuple[str, str]:
    """The suffixes of a file, in small letters: of what it holds, and of its compression."""
    name = file.name.lower()
    compression = next((each for each in COMPRESSIONS if name.endswith(each)), "")
    return Path(name.removesuffix(compression)).suffix, compression


def is_packed(file: Path) -> bool:
    """Whether its bytes are fewer than those of its rows."""
    kind, compression = container(file)
    return bool(compression) or kind == ".parquet"


def open_bytes(file: Path) -> IO[bytes]:
    """Open a file for reading, decompressed as its suffix says."""
    kind, compression = container(file)
    if kind in UNREADABLE:
        raise DataError(f"{kind} files are not read", where=str(file), fix=UNREADABLE[kind])
    if compression == ".gz":
        return io.BufferedReader(gzip.open(file, "rb"), CHUNK_BYTES)
    if compression == ".bz2":
        return io.BufferedReader(bz2.open(file, "rb"), CHUNK_BYTES)
    if compression == ".xz":
        return io.BufferedReader(lzma.open(file, "rb"), CHUNK_BYTES)
    if compression == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(str(file), compression="zstd"), CHUNK_BYTES)
    stream = io.BufferedReader(io.FileIO(file), CHUNK_BYTES)
    begins = stream.peek(16)[:16]
    mark = next((mark for mark in MARKS if begins.startswith(mark)), None)
    if mark is not None and kind != ".parquet":
        stream.close()
        raise DataError(
            f"the file is {MARKS[mark]}, which its name does not say",
            where=str(file),
            fix="name it as what it is, or write it as JSON lines",
        )
    return stream


@dataclass
class RawRow:
    """One row before decoding.

    Attributes:
        line: where it starts. Several rows may share a line of a JSON array.
        payload: the bytes of a JSON value, a decoded object, or None where ``problem`` says why.
        problem: a reason code and a sentence, when the row cannot even be cut out of its file.
        number: its place in the file, from 0.
        end: where the next row begins, in bytes; 0 unless the file is one of lines.
    """

    line: int
    payload: bytes | dict[str, Any] | None
    problem: tuple[str, str] | None = None
    number: int = 0
    end: int = 0


@dataclass(frozen=True)
class FilePosition:
    """Where to go on reading a file: its rows so far, and the line and byte behind them."""

    rows: int = 0
    line: int = 1
    offset: int = 0


BEGINNING = FilePosition()


def read_rows(
    file: Path, *, max_row_bytes: int = LONGEST_ROW, start: FilePosition = BEGINNING
) -> Iterator[RawRow]:
    """Iterate over the rows of one file.

    Args:
        file: to be read.
        max_row_bytes: longer rows are named, not held.
        start: go on behind these rows: with a seek in a plain file of lines, else by reading them.
    """
    seeks = start.offset > 0 and not container(file)[1]
    number = start.rows if seeks else 0
    for row in _rows(file, max_row_bytes, start if seeks else BEGINNING):
        row.number = number
        number += 1
        if number > start.rows:
            yield row


def _rows(file: Path, max_row_bytes: int, start_at: FilePosition) -> Iterator[RawRow]:
    kind, compression = container(file)
    try:
        if start_at.offset:
            with open_bytes(file) as stream:
                stream.seek(start_at.offset)
                start = _Start(b"", start_at.line, b"", start_at.offset)
                yield from _line_rows(start, stream, max_row_bytes)
            return
        if kind == ".parquet" and compression:
            raise DataError(
                "a parquet file is read from its end, so it cannot be compressed as a whole",
                where=str(file),
                fix="decompress it; parquet compresses by itself",
            )
        if kind == ".parquet":
            yield from _parquet_rows(file)
        elif kind == TEXT:
            with open_bytes(file) as stream:
                yield from _text_rows(stream, file)
        elif kind == ".csv":
            with open_bytes(file) as stream:
                yield from _csv_rows(stream, file)
        else:
            with open_bytes(file) as stream:
                start = _skip_blank(stream)
                # In a file of lines a list may be a row; only a bracket alone opens an array there.
                lines = kind in (".jsonl", ".ndjson")
                alone = start.prefix.split(b"\n", 1)[0].strip() == b"["
                if start.first == b"[" and (alone or not lines):
                    yield from _ArrayCutter(start, stream, max_row_bytes, file).rows()
                elif start.first:
                    yield from _line_rows(start, stream, max_row_bytes)
    except (*DAMAGED, EOFError) as error:
        is_short = isinstance(error, EOFError) or "Truncated" in str(error)  # as pyarrow says it
        what = "compressed file ends too early" if is_short else f"file cannot be read: {error}"
        raise DataError(f"the {what}", where=str(file), fix=_AGAIN) from error


@dataclass(frozen=True)
class _Start:
    """The first byte that is not blank, the line it is on, and how far into the file it is."""

    first: bytes
    line: int
    prefix: bytes
    offset: int


def _skip_blank(stream: IO[bytes]) -> _Start:
    line, offset, prefix = 1, 0, b""
    mark = stream.read(3)
    if mark == codecs.BOM_UTF8:
        offset = len(mark)
    else:
        prefix = mark
    while True:
        for place in range(len(prefix)):
            byte = prefix[place : place + 1]
            if byte == b"\n":
                line += 1
            elif byte not in b" \t\r":
                return _Start(byte, line, prefix[place:], offset + place)
        offset += len(prefix)
        prefix = stream.read(4096)
        if not prefix:
            return _Start(b"", line, b"", offset)


def _line_rows(start: _Start, stream: IO[bytes], limit: int) -> Iterator[RawRow]:
    """JSON lines. A line over ``limit`` bytes is skipped without ever being held whole."""
    line, offset = start.line, start.offset
    held = start.prefix  # a few kilobytes at most: what the search for the first byte has read
    while True:
        newline = held.find(b"\n") + 1
        if newline:
            text, held = held[:newline], held[newline:]
        else:
            text, held = held + stream.readline(limit + 2), b""
            if not text:
                return
        size = len(text.rstrip(b"\r\n"))
        offset += len(text)
        if size > limit:
            if not text.endswith(b"\n"):
                skipped = _skip_line(stream)
                size, offset = size + skipped, offset + skipped
            problem = ("row_too_large", f"{size} bytes, at most {limit}")
            yield RawRow(line, None, problem, end=offset)
        elif not text.isspace():
            yield RawRow(line, text, end=offset)
        line += 1


def _skip_line(stream: IO[bytes]) -> int:
    size = 0
    while chunk := stream.readline(CHUNK_BYTES):
        size += len(chunk)
        if chunk.endswith(b"\n"):
            break
    return size


TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|["{}\[\],]', re.DOTALL)
QUOTE, BACKSLASH = b'"\\'
STRING_END = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


class _ArrayCutter:
    """Cuts the elements out of one JSON array by brackets and quotes; decoding comes later.

    An element need not be valid JSON, so a damaged one costs one row. An element over ``limit``
    bytes is passed over without being held whole.
    """

    def __init__(self, start: _Start, stream: IO[bytes], limit: int, file: Path) -> None:
        self._stream = stream
        self._limit = limit
        self._file = file
        self._data = bytearray(start.prefix[1:])
        self._line = start.line
        self._skipped = 0

    def rows(self) -> Iterator[RawRow]:
        closed = False
        while not closed:
            end, closed = self._find_end()
            text = bytes(self._data[:end])
            line = self._line + text.count(b"\n", 0, len(text) - len(text.lstrip()))
            size = self._skipped + len(text)
            if size > self._limit:
                problem = ("row_too_large", f"{size} bytes, at most {self._limit}")
                yield RawRow(line, None, problem)
            elif text.strip():
                yield RawRow(line, text.strip())
            elif not closed:
                yield RawRow(line, None, ("bad_json", "an element of the array is empty"))
            self._drop(end + 1)
            self._skipped = 0
        if (bytes(self._data) + self._stream.read(CHUNK_BYTES)).strip():
            raise DataError(
                "there is text after the end of the JSON array", where=f"{self._file}:{self._line}"
            )

    def _find_end(self) -> tuple[int, bool]:
        """Where the element at the start of the data ends, and whether the array ends there."""
        place, depth, in_string = 0, 0, False
        while True:
            match = (
                STRING_END.match(self._data, place)
                if in_string
                else TOKEN.search(self._data, place)
            )
            if match is None:
                # What was looked at is not looked at again, except an escape cut in two.
                place = len(self._data) - (self._cut_escape(place) if in_string else 0)
                if self._skipped + len(self._data) > self._limit:
                    self._skipped += place
                    self._drop(place)
                    place = 0
                self._more()
                continue
            first, place = self._data[match.start()], match.end()
            byte = self._data[match.start() : place] if first != QUOTE else b""
            if in_string:
                in_string = False
            elif first == QUOTE:
                in_string = place - match.start() == 1  # its end is not there yet
            elif byte in (b"{", b"["):
                depth += 1
            elif depth and byte in (b"}", b"]"):
                depth -= 1
            elif depth == 0 and byte in (b",", b"]"):
                return place - 1, byte == b"]"

    def _cut_escape(self, start: int) -> int:
        """1 if the data ends with a backslash that escapes what is to come, else 0."""
        place = len(self._data)
        while place > start and self._data[place - 1] == BACKSLASH:
            place -= 1
        return (len(self._data) - place) % 2

    def _drop(self, count: int) -> None:
        self._line += self._data.count(b"\n", 0, count)
        del self._data[:count]

    def _more(self) -> None:
        chunk = self._stream.read(CHUNK_BYTES)
        if not chunk:
            raise DataError(
                "the JSON array is not closed: the file was cut, or a quote or bracket is missing",
                where=f"{self._file}:{self._line}",
                fix="write the file again, or use JSON lines, where one bad row costs one row",
            )
        self._data += chunk


TEXT_BYTES = 4 << 20
"""A file of plain text is one row; a longer one is cut behind a line, or where one has no end."""


def _text_rows(stream: IO[bytes], file: Path) -> Iterator[RawRow]:
    line = 1
    while True:
        block = stream.read(TEXT_BYTES)
        if len(block) == TEXT_BYTES:
            block += stream.readline(TEXT_BYTES)
        if not block:
            return
        try:
            text = block.decode("utf-8-sig" if line == 1 else "utf-8")
        except UnicodeDecodeError as error:
            yield RawRow(line, None, ("not_utf8", f"byte {error.start} of the text is not UTF-8"))
        else:
            first = text.lstrip().partition("\n")[0]
            if line == 1 and first.startswith("{") and is_json(first):
                raise DataError(
                    "the first line of this text is a JSON object",
                    where=str(file),
                    fix="rename it to .jsonl",
                )
            if text.strip():
                yield RawRow(line, json.dumps({"text": text}).encode())
        line += block.count(b"\n")


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _csv_rows(stream: IO[bytes], file: Path) -> Iterator[RawRow]:
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="strict", newline="")
    csv.field_size_limit(2**31 - 1)
    reader = csv.DictReader(text, strict=True)
    try:
        names = list(reader.fieldnames or ())
        double = next((name for name in names if names.count(name) > 1), None)
        if double is not None:
            raise DataError(
                f"the csv file has the column {double!r} twice",
                where=str(file),
                fix="rename one of them",
            )
        mark = next((mark for mark in ";\t|" if len(names) == 1 and mark in names[0]), None)
        if mark is not None:
            raise DataError(
                f"the csv file's columns are parted by {mark!r}",
                where=str(file),
                fix="write commas between them",
            )
        for number, row in enumerate(reader, 1):
            if None in row or None in row.values():
                problem = ("bad_csv", f"the row has not {len(reader.fieldnames or ())} fields")
                yield RawRow(number, None, problem)
            else:
                yield RawRow(number, dict(row))
    except UnicodeDecodeError as error:
        raise DataError(
            f"the csv file is not UTF-8 (byte {error.start} of a block)",
            where=str(file),
            fix="convert it: iconv -f <its encoding> -t utf-8",
        ) from error
    except csv.Error as error:
        raise DataError(
            f"bad csv: {error}",
            where=f"{file}:{reader.line_num}",
            fix="correct this line or one before: quotes around a field come in pairs, and one "
            "within is written twice",
        ) from error


def _parquet_rows(file: Path) -> Iterator[RawRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
        number = 0
        for batch in table.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield RawRow(number, without_nulls(row))
    except pyarrow.ArrowException as error:
        what = f"the parquet file cannot be read: {error}"
        raise DataError(what, where=str(file), fix=_AGAIN) from error


def without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """Drop the null fields that a columnar schema adds to rows that never had them."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(item) for key, item in value.items() if item is not None}
        if isinstance(value, list):
            return [clean(item) for item in value]
        return value

    return clean(row)


def decode(payload: bytes | dict[str, Any]) -> Any:
    """Decode a payload."""
    if isinstance(payload, dict):
        return payload
    # Where files were put together, each brought its own byte order mark.
    text = payload.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    decoded = dict(pairs)
    if len(decoded) != len(pairs):
        keys = [key for key, _ in pairs]
        double = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {double!r} occurs twice")
    return decoded


def resolve_files(path: str) -> list[Path]:
    """The files that ``path`` means, sorted by name."""
    plain = Path(path).expanduser()
    if plain.is_dir():
        found = _data_below(plain)
        if not found:
            unread = unread_files(path)
            others = ", ".join(file.name for file in unread[:3])
            ways = [
                UNREADABLE[k] for k in (container(file)[0] for file in unread) if k in UNREADABLE
            ]
            raise DataError(
                f"the directory holds no {', '.join((*SUFFIXES, TEXT))} file"
                + (f"; it holds {others}" if others else ""),
                where=path,
                fix=ways[0] if ways else "name a directory with data files, or a file",
            )
        return found
    if plain.exists() or plain.is_symlink():
        return _once([plain])
    if glob.has_magic(path):
        files = _once(file for file in _matching(plain) if not file.is_dir())
        if not files:
            raise DataError(
                "the glob matches no file", where=path, fix="check the pattern and its directory"
            )
        return files
    raise DataError(
        "there is no such file or directory", where=path, fix="check the path for a typo"
    )


def _matching(pattern: Path) -> list[Path]:
    """What a pattern matches; ``**`` by our own walk, since glob gets lost in circles of links."""
    if "**" not in pattern.parts:
        return sorted(Path(found) for found in glob.glob(str(pattern)))  # noqa: PTH207 (absolute)
    first = next(n for n, part in enumerate(pattern.parts) if glob.has_magic(part))
    root = Path(*pattern.parts[:first])
    files = _files_below(root) if root.is_dir() else []
    return [f for f in files if _fits(f.relative_to(root).parts, pattern.parts[first:])]


def _fits(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_fits(parts[start:], pattern[1:]) for start in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _fits(parts[1:], pattern[1:])


def unread_files(path: str) -> list[Path]:
    """The files of a directory that are not read; hidden ones do not count."""
    plain = Path(path).expanduser()
    if not plain.is_dir():
        return []
    read = set(_data_below(plain))
    return [file for file in _files_below(plain) if file not in read]


def _data_below(directory: Path) -> list[Path]:
    files = _files_below(directory)
    found = [file for file in files if is_data(file)]
    # Next to rows a text is a licence or a note; a folder of nothing but texts is a corpus.
    return _once(found or [file for file in files if container(file)[0] == TEXT])


def _once(files: Iterable[Path]) -> list[Path]:
    """The same, sorted, without the links to others of them: no row is read twice."""
    found: dict[Path, Path] = {}
    for file in files:
        _refuse_name(file)
        regular(file, DataError)
        whole = file.resolve()
        if whole not in found or (found[whole].is_symlink() and not file.is_symlink()):
            found[whole] = file
    return sorted(found.values())


def _files_below(directory: Path) -> list[Path]:
    """Everything in a directory but directories, sorted, without what is hidden.

    Links to directories are followed, each directory once: links may go in circles.
    """
    found: list[Path] = []
    seen: set[Path] = set()
    todo, links = [directory], list[Path]()
    # Links come last: one must not take the place of the directory that it leads to.
    while todo or links:
        place = todo.pop() if todo else links.pop(0)
        whole = place.resolve()
        if whole in seen:
            continue
        seen.add(whole)
        try:
            inside = sorted(place.iterdir())
        except OSError as error:
            raise DataError(
                f"the directory cannot be read: {error.strerror}",
                where=str(place),
                fix="check its permissions",
            ) from error
        for each in inside:
            if each.name.startswith("."):
                continue
            if each.is_dir():
                (links if each.is_symlink() else todo).append(each)
            else:
                found.append(each)
    return sorted(found)


SIDECARS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""What other tools write next to data: it describes files and holds no rows."""


def is_data(file: Path) -> bool:
    """Whether a file in a directory is taken for data, by its name."""
    return container(file)[0] in SUFFIXES and file.name not in SIDECARS


def _refuse_name(file: Path) -> None:
    try:
        str(file).encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"the file's name is not UTF-8: {os.fsencode(file.name)!r}",
            where=str(file.parent).encode("utf-8", "replace").decode(),
            fix="rename it: every record of the run names its files",
        ) from error


def hub_name(path: str) -> str | None:
    """The hub name that ``path`` means, or None if it means a local file."""
    if path.startswith("hf://"):
        return path.removeprefix("hf://").removeprefix("datasets/")
    return path if "/" in path and local_path(path) is None else None


def fetch(
    name: str, split: str, directory: Path, subset: str | None = None, files: Sequence[str] = ()
) -> Path:
    """Download a split (``datasets`` keeps its own cache) and write it as parquet.

    ``directory`` gets ``<fingerprint>.parquet``, once.
    """
    import datasets
    from datasets.naming import camelcase_to_snakecase
    from huggingface_hub import constants

    owner, slash, last = name.rpartition("/")
    copies = f"{owner}{slash and '___'}{camelcase_to_snakecase(last)}"
    fix = "check the path or name; without a network, download it elsewhere and give the files"
    check_hub(name, DataError, name, fix, Path(datasets.config.HF_DATASETS_CACHE, copies))
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE
    chosen: dict[str, Any] = {"name": subset} if subset else {}
    if files:
        chosen["data_files"] = list(files)
    try:
        data = datasets.load_dataset(name, split=split, **chosen)
    except (OSError, ValueError) as error:
        raise DataError(
            f"there is no local file of this name, and the hub's data set {name!r} (split "
            f"{split!r}) cannot be loaded: {type(error).__name__}: {error}",
            where=name,
            fix=fix,
        ) from error
    target = directory / f"{data._fingerprint}.parquet"
    if not target.exists():
        directory.mkdir(parents=True, exist_ok=True)
        temporary = directory / f"tmp-{uuid.uuid4().hex}.parquet"
        data.to_parquet(str(temporary))
        temporary.replace(target)
    return target
