"""Files as users have them: texts, columns of their own, placeholders of what is not text."""

import json

import pytest

from trainkit.data.files import TEXT_BYTES, read_rows, resolve_files
from trainkit.data.formats import decode_row, guess_columns, parse_row, read_row
from trainkit.data.messages import RowError
from trainkit.errors import DataError


def texts_of(file):
    return [decode_row(row)["text"] for row in read_rows(file)]


def test_a_text_is_one_row_and_a_long_one_is_cut_behind_a_line(tmp_path, write):
    short = write("\ufeffé one\n\ntwo\n".encode(), "short.txt")
    assert texts_of(short) == ["é one\n\ntwo\n"]
    line = "é" * 500 + "\n"
    long = write((line * (TEXT_BYTES // 500)).encode(), "long.txt")
    rows = texts_of(long)
    assert len(rows) > 1
    assert "".join(rows) == line * (TEXT_BYTES // 500)
    assert all(row.endswith("\n") for row in rows)
    assert resolve_files(str(tmp_path)) == [long, short]
    rows = write([{"text": "a"}])
    assert resolve_files(str(tmp_path)) == [rows]
    with pytest.raises(DataError, match="JSON object"):
        texts_of(write([{"text": "a"}], "wrong.txt"))


def test_texts_are_trained_whole(write, ready):
    write(b"some text", "corpus/a.txt")
    for mask in ("assistant", "none"):
        data = ready(write(b"more", "corpus/b.txt").parent, mask=mask)
        assert [int(data.num_trained[n]) + 1 for n in (0, 1)] == data.lengths.tolist()


@pytest.mark.parametrize(
    "question", ["instruction", "query", "question", "prompt", "human", "user"]
)
@pytest.mark.parametrize("answer", ["response", "answer", "output", "assistant"])
def test_questions_and_answers_need_no_hint(question, answer):
    row = {"system": "S", question: "Q", answer: "A", "history": [["q", "a"]], "id": 7}
    for each in (row, dict(reversed(row.items()))):
        found = parse_row(each, "auto")
        assert [m.content for m in found.messages] == ["S", "q", "a", "Q", "A"]
        assert found.ignored == ("id",)


def test_an_exchange_may_be_one_object():
    row = {"conversation": [{"human": "Q", "assistant": "A"}, {"human": "R", "assistant": "B"}]}
    for key in ("conversation", "conversations"):
        found = parse_row({key: row["conversation"]}, "auto")
        assert [(m.role, m.content) for m in found.messages] == [
            ("user", "Q"), ("assistant", "A"), ("user", "R"), ("assistant", "B")
        ]  # fmt: skip
        assert found.ignored == ()
    turns = [{"from": "human", "value": "Q", "images": ["x.png"]}, {"from": "gpt", "value": "A"}]
    with pytest.raises(RowError, match="not_text"):
        parse_row({"conversation": turns}, "auto")


@pytest.mark.parametrize(
    "row",
    [
        {"question": "Q", "answer": "A", "context": "C"},
        {"question": "Q", "prompt": "P", "answer": "A"},
        {"question": "Q", "answer": 3},
    ],
)
def test_what_is_not_clear_is_not_guessed(row):
    with pytest.raises(RowError, match="unknown_format"):
        parse_row(row, "auto")


def test_a_hint_takes_no_id_for_a_text():
    assert guess_columns({"id": "7", "q": "Q", "answers": {}, "url": "u"}) == {"text": "q"}
    assert guess_columns({"page_id": "7", "q": "Q", "a": "A"}) == {
        "instruction": "q",
        "output": "a",
    }


def test_the_hint_has_the_files_own_columns_once(write, ready, tiny_tokenizer):
    file = write(b"frage,antwort\n" + b"Was?,Das.\n" * 5, "de.csv")
    with pytest.raises(DataError) as refused:
        ready(file)
    said = str(refused.value)
    assert said.count("no known format") == 1
    assert "--columns instruction=frage,output=antwort" in said
    assert (
        f'path: {json.dumps(str(file))}, columns: {{instruction: "frage", output: "antwort"}}'
        in said
    )
    assert "FILE" not in said
    assert "MODEL" not in said


MEDIA = "<image>\nWhat is it?", "see <video>", "<audio>", "<img>", "<img>a.png</img>", "[IMG_BREAK]"
MEDIA += "<|image_1|>", "<|START_OF_IMG|>", "<start_of_image>", "<IMG_CONTEXT>", "<|audio_bos|>"


@pytest.mark.parametrize("text", MEDIA)
def test_placeholders_of_what_is_not_text_are_refused(text):
    chat = {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "x"}]}
    for row in (chat, {"text": text}, {"prompt": text, "completion": "x"}):
        with pytest.raises(RowError, match="media_placeholder"):
            read_row(row, "auto")
        read_row({**row, "images": []}, "auto")


@pytest.mark.parametrize(
    "text",
    [
        "write `<image>` here",
        "```html\n<video>\n```",
        "<audio>x</audio>",
        "<images>",
        "[IMG]a[/IMG]",
        "<img src='a'>",
    ],
)
def test_code_that_names_them_is_text(text):
    read_row({"text": text}, "auto")
