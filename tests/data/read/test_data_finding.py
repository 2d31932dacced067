"""Directories as people have them: links, loops, leftovers of other tools, odd names."""

import json
import os

import pytest

from trainkit.data.files import read_rows, resolve_files, unread_files
from trainkit.data.formats import decode_row
from trainkit.data.messages import RowError
from trainkit.errors import DataError

ROW = json.dumps({"text": "one"}) + "\n"


@pytest.fixture
def make(tmp_path):
    """Files of a directory by name; a text that begins with ``->`` is a link."""

    def make(files, name="data"):
        for file, text in files.items():
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            if text.startswith("->"):
                path.symlink_to(text[2:])
            else:
                path.write_text(text)
        return tmp_path / name

    return make


def names(paths, below):
    return [str(path.relative_to(below)) for path in paths]


def test_links_to_directories_are_followed_once(make, tmp_path):
    make({"far.jsonl": ROW, "deep/er.jsonl": ROW}, "elsewhere")
    data = make(
        {
            "a.jsonl": ROW,
            "loop": "->.",
            "in/up": "->..",
            "in/b.jsonl": ROW,
            "also": f"->{tmp_path}/elsewhere",
            "again": f"->{tmp_path}/elsewhere",
        }
    )
    found = names(resolve_files(str(data)), data)
    assert found == ["a.jsonl", "again/deep/er.jsonl", "again/far.jsonl", "in/b.jsonl"]
    assert names(resolve_files(f"{data}/**/*.jsonl"), data) == found
    assert names(resolve_files(f"{data}/**/far*"), data) == ["again/far.jsonl"]
    assert names(resolve_files(f"{data}/i[n]/**"), data) == ["in/b.jsonl"]
    assert names(resolve_files(f"{data}/**/deep/**/*.jsonl"), data) == ["again/deep/er.jsonl"]
    only = make({"link": f"->{tmp_path}/elsewhere"}, "only")
    assert len(resolve_files(str(only))) == 2


@pytest.mark.parametrize("link", ["0-latest.jsonl", "z-latest.jsonl"])
def test_a_file_and_a_link_to_it_are_read_once(make, link):
    data = make({"a.jsonl": ROW, link: "->a.jsonl"})
    assert names(resolve_files(str(data)), data) == ["a.jsonl"]
    assert names(unread_files(str(data)), data) == [link]
    assert names(resolve_files(f"{data}/*.jsonl"), data) == ["a.jsonl"]


def test_a_link_to_nothing_is_missing_data(make):
    data = make({"a.jsonl": ROW, "b.jsonl": "->gone", "notes": "->gone"})
    with pytest.raises(DataError, match="leads nowhere") as error:
        resolve_files(str(data))
    assert error.value.where.endswith("b.jsonl")


def test_what_other_tools_leave_is_named_or_hidden(make):
    left = ("dataset_info.json", "dataset_infos.json", "state.json", "a.jsonl.bak", "_SUCCESS")
    hidden = (".DS_Store", "._a.jsonl", "__MACOSX/._a.jsonl", ".cache/x.jsonl")
    data = make(dict.fromkeys((*left, *hidden), "{}") | {"a.jsonl": ROW})
    os.mkfifo(data / "pipe")
    assert names(resolve_files(str(data)), data) == ["a.jsonl"]
    assert names(unread_files(str(data)), data) == sorted((*left, "pipe"))
    saved = make({"data-0.arrow": "", "dataset_info.json": "{}"}, "saved")
    with pytest.raises(DataError, match=r"it holds data-0\.arrow") as error:
        resolve_files(str(saved))
    assert error.value.fix == "write it as parquet"


def test_what_is_no_plain_file_is_refused(make):
    data = make({"x": ""})
    os.mkfifo(data / "pipe")
    os.mkfifo(data / "pipe.jsonl")
    for path in (data, data / "pipe", f"{data}/*", "/dev/null", "/proc/kmsg"):
        with pytest.raises(DataError, match="a pipe, a socket or a device"):
            resolve_files(str(path))
    (data / "pipe").unlink()
    (data / "pipe.jsonl").unlink()
    odd = os.fsencode(data) + b"/\xff.jsonl"
    with open(odd, "w") as file:  # noqa: PTH123 (the name is bytes)
        file.write(ROW)
    for path in (str(data), f"{data}/*.jsonl", os.fsdecode(odd)):
        with pytest.raises(DataError, match="not UTF-8") as error:
            resolve_files(path)
        str(error.value).encode()


def test_files_put_together_keep_their_rows(make):
    data = make({"a.jsonl": ROW + "\ufeff" + ROW})
    (file,) = resolve_files(str(data))
    rows = [decode_row(row) for row in read_rows(file, max_row_bytes=1000)]
    assert rows == [{"text": "one"}] * 2


@pytest.mark.parametrize(
    ("content", "remedy"),
    [
        (b'{\n  "text": "one"\n}\n', "jq -c"),
        (ROW.rstrip().encode() * 2, "Extra data"),  # two on a line: another mistake
        (b"\r".join([ROW.rstrip().encode()] * 2), "lines end in CR alone"),
    ],
)
def test_rows_that_are_not_lines_are_named_with_the_command(make, content, remedy):
    (file,) = resolve_files(str(make({"a.jsonl": ROW})))
    file.write_bytes(content)
    first = next(read_rows(file, max_row_bytes=1000))
    with pytest.raises(RowError) as refused:
        decode_row(first)
    assert remedy in refused.value.detail
    assert ("jq" in refused.value.detail) == (remedy == "jq -c")


@pytest.mark.parametrize("tail", [b"\0" * 64, ROW.encode("utf-16-le")])
def test_nul_bytes_are_named(make, tail):
    (file,) = resolve_files(str(make({"a.jsonl": ROW})))
    file.write_bytes(file.read_bytes() + tail)
    last = list(read_rows(file, max_row_bytes=1000))[1]
    with pytest.raises(RowError, match="NUL bytes"):
        decode_row(last)
