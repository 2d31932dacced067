"""Batches of answers: the same as one by one, kept, resumed, and never mixed up."""

import json

import pytest
from tiny import TABLES
from train.router_cases import make_moe
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from trainkit.data.questions import QuestionOptions, read_questions
from trainkit.errors import DataError
from trainkit.infer.batch import generate_file
from trainkit.infer.engine import Engine
from trainkit.infer.sampling import SamplingOptions
from trainkit.models.generation import generate_rows


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "p.txt"
    path.write_text("\n".join(["one", "a longer prompt", "", "three", "fourth prompt", "five"]))
    return read_questions(str(path))


@pytest.fixture(scope="module")
def engine(tiny_qwen2):
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen2).eval()
    return Engine(model, AutoTokenizer.from_pretrained(tiny_qwen2))


def run(engine, prompts, target, sampling=None, **options):
    sampling = sampling or SamplingOptions(max_new_tokens=6)
    how = {"batch_size": 2, "settings": {"model": "tiny"}, **options}
    return generate_file(lambda: engine, prompts, target, sampling, **how)


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_batch_equals_one_by_one(engine, prompts, tmp_path):
    """Left padding must not change an answer (greedy, float32)."""
    run(engine, prompts, tmp_path / "out.jsonl", batch_size=5)
    sampling = SamplingOptions(max_new_tokens=6)
    for row, prompt in zip(rows(tmp_path / "out.jsonl"), prompts, strict=True):
        answer = engine.answer(prompt.row, sampling)
        assert row["answer"] == answer.text
        assert row["num_prompt_tokens"] == len(answer.input_ids)
        assert row["finish"] == "length"
        assert row["messages"][-1] == {"role": "assistant", "content": answer.text}
    assert [row["id"] for row in rows(tmp_path / "out.jsonl")][2] == "p.txt:4"


def test_padding_is_not_looked_at(engine, prompts, monkeypatch):
    """A tiny model may answer the same with it, so look at what it is given."""
    seen, generate = {}, engine.model.generate

    def record(**options):
        seen.update(options)
        return generate(**options)

    monkeypatch.setattr(engine.model, "generate", record)
    asked = [prompt.row for prompt in prompts]
    engine.answer_batch(asked, SamplingOptions(max_new_tokens=1))
    lengths = [len(engine.prompt_ids(each)) for each in asked]
    assert len(set(lengths)) > 1
    assert seen["attention_mask"].sum(1).tolist() == lengths
    assert seen["attention_mask"][:, -1].all()


def test_a_prompt_leaves_room_for_a_token(engine, prompts, monkeypatch):
    length = len(engine.prompt_ids(prompts[0].row))
    monkeypatch.setattr(engine, "context", length + 1)
    engine.check_fit(prompts[0].row)
    monkeypatch.setattr(engine, "context", length)
    with pytest.raises(DataError, match="the answer included"):
        engine.check_fit(prompts[0].row)


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_resumed_equals_uninterrupted(engine, prompts, tmp_path, cut):
    """Killed after a number of batches, with half a line written; sampling continues the same."""
    sampling = SamplingOptions(max_new_tokens=6, temperature=2.0)
    run(engine, prompts, tmp_path / "whole.jsonl", sampling)
    batches = []

    class Killed(Exception):
        pass

    def die(done, total):
        batches.append(done)
        if len(batches) == cut + 1:
            raise Killed

    with pytest.raises(Killed):
        run(engine, prompts, tmp_path / "out.jsonl", sampling, progress=die)
    assert not (tmp_path / "out.jsonl").exists()
    partial = tmp_path / ".out.jsonl.partial"
    partial.write_text(partial.read_text()[:-20])
    found = run(engine, prompts, tmp_path / "out.jsonl", sampling)
    assert found == 2 * cut
    assert (tmp_path / "out.jsonl").read_text() == (tmp_path / "whole.jsonl").read_text()
    assert not partial.exists()


def test_finished_file_is_left_alone(engine, prompts, tmp_path):
    run(engine, prompts, tmp_path / "out.jsonl")
    before = (tmp_path / "out.jsonl").stat().st_mtime_ns

    def never():
        raise AssertionError("loaded for nothing")

    sampling = SamplingOptions(max_new_tokens=6)
    found = generate_file(
        never, prompts, tmp_path / "out.jsonl", sampling, batch_size=2, settings={"model": "tiny"}
    )
    assert found == len(prompts)
    assert (tmp_path / "out.jsonl").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "change",
    [
        {"sampling": SamplingOptions(max_new_tokens=7)},
        {"settings": {"model": "other"}},
        {"batch_size": 3},
    ],
)
def test_other_settings_are_refused(engine, prompts, tmp_path, change):
    run(engine, prompts, tmp_path / "out.jsonl")
    with pytest.raises(DataError, match="other options"):
        run(engine, prompts, tmp_path / "out.jsonl", **change)


def test_bad_turn_is_named_before_anything_is_answered(engine, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"messages": [{"role": "user"}]}\n')
    with pytest.raises(DataError, match=r"p\.jsonl:3: .*'content' is missing"):
        run(engine, read_questions(str(path)), tmp_path / "out.jsonl", progress=pytest.fail)


def test_place_that_cannot_be_written(prompts, tmp_path):
    (tmp_path / "file").write_text("")
    for target in (tmp_path, tmp_path / "file" / "out.jsonl"):
        with pytest.raises(DataError, match="cannot be written"):
            run(None, prompts, target)


@pytest.mark.parametrize("text", ["", "my notes\n"])
def test_file_of_something_else_is_no_finished_answer(engine, prompts, tmp_path, text):
    (tmp_path / "out.jsonl").write_text(text)
    with pytest.raises(DataError, match="made from other questions"):
        run(engine, prompts, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text() == text


def test_prompt_files(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt": "hi"}\n'
        '{"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "q"}]}\n'
        '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}\n'
    )
    questions = read_questions(str(path), QuestionOptions(system="X"))
    roles = [[m.role for m in question.row.messages] for question in questions]
    assert roles == [["system", "user"]] * 3
    assert questions[1].row.messages[0].content == "S"


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("{", r"p\.jsonl:1: Expecting property name"),
        ("[1]", "turn 1 is a number"),
        ('{"messages": [3]}', "turn 1 is a number"),
        ('{"messages": []}', "no question"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "no question"),
        ("[" * 9999, "not closed|nests too deep|Expecting"),
        ("", "no question"),
    ],
)
def test_bad_prompts_name_their_line(tmp_path, line, word):
    path = tmp_path / "p.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(DataError, match=word):
        read_questions(str(path))


def test_beams_find_what_greedy_misses(engine):
    """Three beams give an answer at least as likely as the greedy one."""
    import torch

    messages = [{"role": "user", "content": "x"}]

    def likelihood(answer):
        ids = torch.tensor([[*answer.input_ids, *answer.output_ids]])
        with torch.inference_mode():
            scores = engine.model(ids).logits.log_softmax(-1)[0]
        start = len(answer.input_ids)
        return sum(scores[start + i - 1, token] for i, token in enumerate(answer.output_ids))

    greedy = engine.answer(messages, SamplingOptions(max_new_tokens=5))
    pieces = []
    beams = engine.answer(
        messages, SamplingOptions(max_new_tokens=5, num_beams=4), on_text=pieces.append
    )
    assert likelihood(beams) >= likelihood(greedy) - 1e-4
    assert pieces == [beams.text]


def test_a_model_whose_routers_have_a_loss_answers(tiny_tokenizer):
    """With a cache transformers fails to compute it, and nobody asks for it here."""
    model = make_moe(len(tiny_tokenizer)).eval()
    engine = Engine(model, tiny_tokenizer)
    questions = [[{"role": "user", "content": text}] for text in ("Hello", "And a longer one")]
    first, again = (
        engine.answer_batch(questions, SamplingOptions(max_new_tokens=3)) for _ in range(2)
    )
    assert first == again
    assert model.config.output_router_logits  # training goes on with it


@pytest.mark.parametrize("kind", TABLES)
def test_a_row_that_fills_a_table_of_positions_ends_while_others_go_on(kind):
    config = AutoConfig.for_model(kind, vocab_size=99, **TABLES[kind])
    model = AutoModelForCausalLM.from_config(config).eval()
    prompts, how = [[5, 6], [7] * 9, [8] * 16], {"max_new_tokens": 99, "do_sample": False}
    model.generation_config.eos_token_id = None
    rows = generate_rows(model, prompts, 0, **how)
    assert [len(row) for row in rows] == [14, 7, 0]
    assert generate_rows(model, prompts[:1], 0, **how) == rows[:1]
