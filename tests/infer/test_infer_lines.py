"""Answers as lines: no character cuts one, every field stays, what is too long is named."""

import ast
import json
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path

import pytest

import trainkit
from trainkit.data.questions import QuestionOptions, read_questions
from trainkit.errors import DataError
from trainkit.infer.batch import generate_file
from trainkit.infer.conversation import ChatHistory
from trainkit.infer.engine import Engine
from trainkit.infer.sampling import SamplingOptions

SEPARATORS = [*"\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\r\n", "\r\n"]
FEW = SamplingOptions(max_new_tokens=8)


def write(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return read_questions(str(path), QuestionOptions())


def lines(path):
    return [json.loads(line) for line in path.read_bytes().decode().split("\n")[:-1]]


@pytest.fixture
def run(parrot, tiny_tokenizer):
    """Answer questions into a file with given answers, by a model of so wide a context."""

    def run(questions, target, answers, *, context=512, **options):
        model = parrot(tiny_tokenizer, answers)
        model.config.max_position_embeddings = context
        how = {"batch_size": 1, "settings": {}, **options}
        return generate_file(lambda: Engine(model, tiny_tokenizer), questions, target, FEW, **how)

    return run


@pytest.mark.parametrize("mark", SEPARATORS, ids=ascii)
def test_no_character_cuts_a_line(mark, run, tmp_path):
    """In questions, fields and answers: a call that was killed goes on where it stopped."""
    rows = [{"id": f"{n}{mark}", "prompt": f"a{mark}b", "note": mark} for n in range(4)]
    questions = write(tmp_path / "q.jsonl", rows)
    answers = [f"x{mark}y{n}" for n in range(4)]
    target = tmp_path / "out.jsonl"
    assert run(questions, target, answers) == 0
    whole = target.read_bytes()
    assert [row["answer"] for row in lines(target)] == answers
    assert run(questions, target, []) == 4  # a finished file is finished
    partial = tmp_path / ".out.jsonl.partial"
    target.rename(partial)
    kept = whole.split(b"\n")
    partial.write_bytes(b"\n".join(kept[:2]) + b"\n" + kept[2][:-3])
    assert run(questions, target, answers[2:]) == 2
    assert target.read_bytes() == whole


ODD = ["\x00", "\ud800", "\udc00\ud800", "\ufeff", "\uffff", "\U0010ffff", "\x1b[2J", "\u202e"]


@pytest.mark.parametrize("mark", ODD, ids=ascii)
def test_a_cut_anywhere_loses_no_line_whatever_is_in_the_fields(mark, run, tmp_path):
    """Half surrogates and NUL, which no prompt may hold, in ids, names and values of fields."""
    rows = [
        {"id": f"{n}{mark}", "prompt": f"q{n}", f"k{mark}": mark, "deep": {mark: [mark]}}
        for n in range(4)
    ]
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    questions = read_questions(str(path), QuestionOptions())
    target, partial = tmp_path / "out.jsonl", tmp_path / ".out.jsonl.partial"
    run(questions, target, list("abcd"))
    whole = target.read_bytes()
    kept = lines(target)
    for row, question in zip(kept, rows, strict=True):
        assert {key: row[key] for key in question} == question
    for cut in (1, len(whole) // 2, len(whole) - 2, len(whole) - 1):
        target.unlink()
        partial.write_bytes(whole[:cut])
        done = whole[:cut].count(b"\n")
        assert run(questions, target, list("abcd")[done:]) == done
        assert target.read_bytes() == whole


def test_the_types_of_a_parquet_file_are_written_as_json(run, tmp_path):
    import pyarrow
    import pyarrow.parquet

    day = datetime(2024, 1, 2, 3, tzinfo=timezone.utc)
    row = {
        "prompt": "q",
        "when": day,
        "day": day.date(),
        "raw": b"\xff\x00",
        "price": Decimal("1.5"),
    }
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "q.parquet")
    questions = read_questions(str(tmp_path / "q.parquet"), QuestionOptions())
    assert run(questions, tmp_path / "out.jsonl", ["a"]) == 0
    (answered,) = lines(tmp_path / "out.jsonl")
    assert answered["when"].startswith("2024-01-02T03:00")
    assert [answered[key] for key in ("day", "raw", "price")] == ["2024-01-02", "/wA=", "1.5"]
    assert run(questions, tmp_path / "out.jsonl", []) == 1


@pytest.mark.parametrize("mark", SEPARATORS, ids=ascii)
def test_no_character_cuts_a_saved_chat(mark, tmp_path):
    history = ChatHistory()
    for number in range(3):
        history.add(f"q{mark}", f"a{mark}")
        assert history.save(tmp_path / "chat.jsonl") == number + 1
    assert len(lines(tmp_path / "chat.jsonl")) == 3


def test_every_field_of_a_row_is_in_its_line(run, tmp_path):
    rows = [
        {
            "id": 17,
            "prompt": "p",
            "answer": "the reference",
            "settings": 1,
            "row": 2,
            "tag": [None],
        },
        {"messages": [{"role": "user", "content": "q"}], "half": "\ud83d"},
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "old"}]},
    ]
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(read_questions(str(path)), tmp_path / "out.jsonl", ["new"] * 3)
    first, second, third = lines(tmp_path / "out.jsonl")
    assert (first["id"], first["tag"], first["prompt"]) == (17, [None], "p")
    assert first["row"] == {"answer": "the reference", "settings": 1, "row": 2}
    assert (second["id"], second["half"]) == ("q.jsonl:2", "\ud83d")
    assert "row" not in second
    assert third["row"]["messages"][-1]["content"] == "old"
    assert third["messages"][-1] == {"role": "assistant", "content": "new"}


@pytest.fixture
def long_questions(tmp_path):
    turns = [
        {"role": role, "content": f"{role} " * 12}
        for role in ("user", "assistant", "user", "assistant")
    ]
    rows = [
        {"prompt": "short"},
        {
            "messages": [
                {"role": "system", "content": "S"},
                *turns,
                {"role": "user", "content": "q"},
            ]
        },
        {"prompt": "long " * 99},
    ]
    return write(tmp_path / "q.jsonl", rows)


@pytest.fixture
def narrow(run, tmp_path):
    """Answer with a context of 160 tokens; returns the lines."""

    def narrow(questions, answers, too_long):
        target = tmp_path / "out.jsonl"
        run(questions, target, answers, context=160, batch_size=2, too_long=too_long)
        return lines(target)

    return narrow


def test_a_prompt_that_does_not_fit_is_refused_by_name(narrow, long_questions, tmp_path):
    with pytest.raises(
        DataError, match=r"q\.jsonl:2.*tokens; the model's context holds 160"
    ) as told:
        narrow(long_questions, [], "error")
    assert "--too-long" in str(told.value)
    assert not (tmp_path / "out.jsonl").exists()


def test_a_prompt_that_does_not_fit_is_dropped_by_name(narrow, long_questions):
    rows = narrow(long_questions, ["a"], "drop")
    assert [row["finish"] for row in rows] == ["stop", "too_long", "too_long"]
    assert [row["answer"] for row in rows] == ["a", None, None]
    assert "context holds 160" in rows[1]["problem"]


def test_an_answer_ends_where_the_context_does(tiny_qwen2):
    """Each row by its own length, as if it had been alone; with beams as well."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_qwen2).eval()
    asked = [[{"role": "user", "content": "x" * length}] for length in (2, 9)]
    for beams in (1, 2):
        sampling = SamplingOptions(max_new_tokens=40, num_beams=beams)
        engine = Engine(model, AutoTokenizer.from_pretrained(tiny_qwen2))
        engine.stop_ids = ()
        engine.context = len(engine.prompt_ids(asked[1])) + 5
        answers = engine.answer_batch(asked, sampling)
        for answer in answers:
            assert answer.finish == "context"
            assert len(answer.input_ids) + len(answer.output_ids) == engine.context
        if beams == 1:
            alone = [engine.answer(each, sampling).output_ids for each in asked]
            assert [answer.output_ids for answer in answers] == alone


# Texts that other programs wrote and in which a line can end in nothing but a newline.
NO_JSON_LINES = {
    "checkpoint/weights/contents.py", "checkpoint/weights/companions.py", "doctor/checks.py",
    "cli/app.py", "estimate/build.py", "export/llama_cpp.py", "infer/locate.py",
    "models/attention/proof.py", "models/proof/compare.py", "models/proof/plan.py",
    "recipe/document.py", "run/environment.py", "run/report.py", "train/rehearse.py",
    "parallel/launch.py", "models/tokenizer.py", "train/images.py",
}  # fmt: skip


def test_no_file_of_json_lines_is_cut_by_splitlines():
    """It cuts at ten characters that may stand in a JSON text; a newline may not."""
    root = Path(trainkit.__file__).parent
    found = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "splitlines"
    }
    assert found <= NO_JSON_LINES
