"""Damage that once went by in silence, took ages, or was hard to understand."""

import copy
import json
import random
import re
import time

import pytest
from chats import chat
from tokenizers import processors

from trainkit.data import DataOptions, Source
from trainkit.data.builder import SampleBuilder
from trainkit.data.files import RawRow, decode, read_rows
from trainkit.data.formats import decode_row
from trainkit.data.messages import RowError
from trainkit.errors import DataError

LIMIT = 1 << 26


def rows_of(path, limit=LIMIT):
    return list(read_rows(path, max_row_bytes=limit))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.999])
def test_a_cut_zst_is_an_error_and_not_a_shorter_file(tmp_path, share):
    zstandard = pytest.importorskip("zstandard")
    text = "".join(json.dumps(chat(f"q{random.random()}", "a")) + "\n" for _ in range(9000))
    whole = zstandard.ZstdCompressor().compress(text.encode())
    path = tmp_path / "x.jsonl.zst"
    path.write_bytes(whole + whole)
    assert len(rows_of(path)) == 18_000
    path.write_bytes(whole + whole[: int(len(whole) * share)])
    with pytest.raises(DataError, match="ends too early"):
        rows_of(path)
    path.write_bytes(whole + b"garbage")
    with pytest.raises(DataError, match="ZSTD"):
        rows_of(path)


def test_two_csv_columns_of_one_name_are_refused(write):
    path = write(b"instruction,instruction,output\nq,r,a\n", "x.csv")
    with pytest.raises(DataError, match="'instruction' twice"):
        rows_of(path)


@pytest.mark.parametrize("mark", [";", "\t", "|"])
def test_columns_that_no_comma_parts_are_named(write, mark):
    path = write(f"instruction{mark}output\nq{mark}a\n".encode(), "x.csv")
    with pytest.raises(DataError, match=f"parted by {re.escape(repr(mark))}"):
        rows_of(path)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
def test_another_unicode_encoding_is_named(write, ready, encoding):
    text = "\ufeff" * encoding.endswith("be") + json.dumps(chat("q", "a")) + "\n"
    with pytest.raises(DataError, match="UTF-16 or UTF-32"):
        ready(write(text.encode(encoding)))


@pytest.mark.parametrize(
    "payload", [b'{"a": "\x07"}', b'{"a": "b', b'{"a": 1,}', b'{"a": "\\x"}', b"{a}", b"{1", b"1 2"]
)
def test_where_the_json_ends_is_a_sentence(payload):
    """Whatever Python has to say of it; some of its sentences end with "at"."""
    with pytest.raises(RowError, match=r"^\w+: \w.*[^:.] at column \d+$") as refused:
        decode_row(RawRow(1, payload))
    assert "at at" not in str(refused.value)


def test_a_huge_element_of_an_array_is_read_in_one_pass(write):
    """Fifty megabytes in one string, full of escapes: each byte is looked at once or twice."""
    inside = b'\\\\\\"x' * (10 * 2**20)
    path = write(b'[{"text": "a"}, {"text": "' + inside + b'"}, {"text": "b"}]', "x.json")
    started = time.process_time()
    rows = rows_of(path)
    assert time.process_time() - started < 10  # 1 s here; 40 s when each block starts over
    assert len(decode(rows[1].payload)["text"]) == 3 * 10 * 2**20
    assert [decode(row.payload)["text"] for row in (rows[0], rows[2])] == ["a", "b"]


@pytest.mark.parametrize(
    "row", [{"text": "<s>plain"}, {"prompt": "<s>ask ", "completion": "plain"}]
)
def test_bos_in_a_text_is_not_doubled_by_the_tokenizer(row, tiny_tokenizer):
    """Rows rendered elsewhere begin with the token that the tokenizer adds by itself."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    without = {key: value.removeprefix("<s>") for key, value in row.items()}
    rows = [RawRow(n, json.dumps(each).encode()) for n, each in enumerate((row, without))]
    builder = SampleBuilder(tokenizer, DataOptions())
    given, wanted = (builder.build([each], Source("x")) for each in rows)
    (one,), (other,) = given.samples, wanted.samples
    assert one.input_ids.tolist() == other.input_ids.tolist()
    assert one.loss_mask.tolist() == other.loss_mask.tolist()
    assert given.counts["double_bos"] == 1
    assert wanted.counts["double_bos"] == 0
