"""Containers: the same rows whatever they come in, with the right line numbers."""

import bz2
import gzip
import json
import lzma
import re

import pytest
import zstandard

from trainkit.data.files import MARKS, UNREADABLE, decode, read_rows, resolve_files
from trainkit.errors import DataError

ROWS = [
    {"text": "one"},
    {"text": 'brackets ]}[{ "quoted\\" and , commas'},
    {"text": "drei é 三 😀"},
]
LIMIT = 1 << 20


def read(path, limit=LIMIT):
    return [
        (r.line, r.problem[0] if r.problem else decode(r.payload))
        for r in read_rows(path, max_row_bytes=limit)
    ]


LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def test_json_lines_with_blank_lines_bom_and_crlf(write):
    path = write(b"\xef\xbb\xbf\n" + LINES.replace(b"\n", b"\r\n\r\n"))
    assert read(path) == [(2, ROWS[0]), (4, ROWS[1]), (6, ROWS[2])]


def test_lists_may_be_rows_of_json_lines(write):
    messages = [{"role": "user", "content": "q"}]
    text = (json.dumps(messages) + "\n").encode()
    assert read(write(text * 2)) == [(1, messages), (2, messages)]
    assert [row for _, row in read(write(json.dumps(ROWS, indent=1).encode()))] == ROWS


@pytest.mark.parametrize("indent", [None, 1])
def test_json_array(write, indent):
    path = write(json.dumps(ROWS, indent=indent, ensure_ascii=False).encode(), "x.json")
    rows = read(path)
    assert [row for _, row in rows] == ROWS
    assert [line for line, _ in rows] == ([1, 1, 1] if indent is None else [2, 5, 8])


def test_json_array_across_chunks(write, monkeypatch):
    rows = ROWS * 20
    path = write(json.dumps(rows).encode(), "x.json")
    for size in (2, 3, 7, 64):
        monkeypatch.setattr("trainkit.data.files.CHUNK_BYTES", size)
        assert [row for _, row in read(path)] == rows


def test_damaged_element_of_an_array_costs_one_row(write):
    path = write(b'[{"text": "a"},\n {"text": nope},\n {"text": "c"}]', "x.json")
    raw = list(read_rows(path))
    assert [row.line for row in raw] == [1, 2, 3]
    with pytest.raises(ValueError, match="Expecting value"):
        decode(raw[1].payload)


@pytest.mark.parametrize("text", [b'[{"a": 1}', b'[{"a": "x}]', b'[{"a": 1}] tail'])
def test_an_array_that_was_cut_is_an_error_with_a_line(write, text):
    with pytest.raises(DataError, match=r"x\.json:1"):
        read(write(text, "x.json"))


@pytest.mark.parametrize("name", ["x.jsonl", "x.json"])
def test_a_row_beyond_the_limit_is_passed_over(write, name):
    big = {"text": 'x"' * 5000}
    rows = [ROWS[0], big, ROWS[2]]
    path = write(rows, name) if name == "x.jsonl" else write(json.dumps(rows).encode(), name)
    assert [row for _, row in read(path, limit=1000)] == [ROWS[0], "row_too_large", ROWS[2]]


def test_a_row_of_exactly_the_limit_is_kept(write):
    path = write(LINES)
    limit = max(len(line) for line in LINES.splitlines())
    assert len([row for _, row in read(path, limit) if isinstance(row, dict)]) == 3
    assert [row for _, row in read(path, limit - 1)].count("row_too_large") == 1


PACKED = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


@pytest.mark.parametrize("compression", ["", *PACKED])
@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".json"])
@pytest.mark.parametrize("case", [str.lower, str.upper, str.title])
def test_every_container_is_read_in_any_case(write, tmp_path, compression, suffix, case):
    packed = PACKED.get(compression, bytes)(LINES)
    path = write(packed, case(f"x{suffix}{compression}"))
    assert read(path) == list(enumerate(ROWS, 1))
    assert resolve_files(str(tmp_path)) == [path]


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.jsonl.gz", LINES), ("a.parquet", b"PAR1"), ("a.csv", b'a,b\n"open,1\n')],
)
def test_a_file_that_is_not_what_it_is_called_has_a_fix(write, name, content):
    with pytest.raises(DataError) as refused:
        read(write(content, name))
    assert refused.value.fix


@pytest.mark.parametrize("suffix", PACKED)
@pytest.mark.parametrize("damage", [lambda data: data[:-20], lambda data: data[:40] + data[60:]])
def test_damaged_compressed_files_are_errors(write, suffix, damage):
    packed = PACKED[suffix](b"".join(b'{"a": %d}\n' % n for n in range(5000)))
    with pytest.raises(DataError, match=r"too early|cannot be read|ZSTD"):
        read(write(damage(packed), f"x.jsonl{suffix}"))


@pytest.mark.parametrize("suffix", sorted(UNREADABLE))
def test_files_of_other_kinds_are_refused_by_name(write, suffix):
    for name in (f"x{suffix}", f"x{suffix.upper()}", f"x{suffix}.gz"):
        with pytest.raises(DataError, match=re.escape(f"{suffix} files are not read")):
            read(write(b"data", name))


@pytest.mark.parametrize("mark", MARKS)
def test_a_file_that_is_no_text_is_called_what_it_is(write, mark):
    with pytest.raises(DataError, match=re.escape(MARKS[mark])):
        read(write(mark + b" and more", "x.jsonl"))


def test_parquet_loses_the_nulls_a_schema_adds(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
        {"messages": [{"role": "user", "content": "q", "name": "n"}]},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    assert read(tmp_path / "x.parquet") == list(enumerate(rows, 1))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(DataError, match="parquet"):
        read(tmp_path / "bad.parquet")


def test_csv(write):
    path = write(b'instruction,output\n"a, b","c\nd"\ne\n', "x.csv")
    assert read(path) == [(1, {"instruction": "a, b", "output": "c\nd"}), (2, "bad_csv")]
    with pytest.raises(DataError, match="not UTF-8"):
        read(write("a,b\né,x\n".encode("latin-1"), "y.csv"))


def test_empty_file(write):
    assert read(write(b"")) == []
    assert read(write(b" \n \n", "x.json")) == []


def test_duplicate_keys_are_refused(write):
    (row,) = read_rows(write(b'{"text": "a", "text": "b"}'))
    with pytest.raises(ValueError, match="twice"):
        decode(row.payload)


def test_files_of_a_path(tmp_path):
    for name in ("b.jsonl", "a.json", "sub/c.jsonl.gz", ".hidden.jsonl", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    names = [str(f.relative_to(tmp_path)) for f in resolve_files(str(tmp_path))]
    assert names == ["a.json", "b.jsonl", "sub/c.jsonl.gz"]
    assert [f.name for f in resolve_files(str(tmp_path / "*.json*"))] == ["a.json", "b.jsonl"]
    with pytest.raises(DataError, match="matches no file"):
        resolve_files(str(tmp_path / "*.nothing"))
    with pytest.raises(DataError, match="no such file"):
        resolve_files(str(tmp_path / "nothing.json"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no"):
        resolve_files(str(tmp_path / "empty"))
