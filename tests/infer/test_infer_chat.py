"""Chat sees the very ids that training sees, streams, and saves what trains again."""

import json
import os
import shutil
import signal
from contextlib import nullcontext

import pytest

from trainkit.cli.commands.chat import Chat
from trainkit.data import DataOptions, Ledger, Source, prepare
from trainkit.data.messages import TextRow
from trainkit.errors import DataError, ModelError, RecipeError
from trainkit.infer.conversation import ChatHistory
from trainkit.infer.engine import Engine, TextStream, load_engine
from trainkit.infer.locate import find_model
from trainkit.infer.sampling import SamplingOptions
from trainkit.models.tokenizer import stop_token_ids
from trainkit.options import ModelOptions

TALK = [
    ("Hello, who are you?", "I am a parrot, élan 🙂 and 12345."),
    ("  spaces and <|im_end|> inside ", "Fine:\n\n- one\n- two  "),
    ("数字？", "四十二"),
]


def make_chat(tokenizer, parrot, *, system=None, options=None, answers=None):
    answers = [answer for _, answer in TALK] if answers is None else answers
    engine = Engine(parrot(tokenizer, answers), tokenizer, options)
    return Chat(engine, ChatHistory(system), SamplingOptions())


def training_ids(path, tokenizer, tmp_path, **options):
    prepared = prepare(
        [Source(str(path))],
        tokenizer,
        DataOptions(cache_dir=str(tmp_path / "cache"), **options),
        ledger=Ledger(tmp_path / "dropped.jsonl"),
    )
    assert len(prepared) == 1
    return prepared[0]


@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize("policy", ["keep", "You are a tested model.", "none"])
def test_ids_in_chat_are_the_ids_of_training(tiny_tokenizer, parrot, tmp_path, system, policy):
    """Every prompt of the chat is a prefix of the training sample, and the answers follow it."""
    chat = make_chat(
        tiny_tokenizer, parrot, system=system, options=DataOptions(system_policy=policy)
    )
    for question, _ in TALK:
        chat.ask(question)
    chat.command(f"/save {tmp_path / 'saved.jsonl'}")
    sample = training_ids(tmp_path / "saved.jsonl", tiny_tokenizer, tmp_path, system_policy=policy)
    trained = sample["input_ids"].tolist()
    for prompt, (_, answer) in zip(chat.engine.model.seen, TALK, strict=True):
        reply = tiny_tokenizer.encode(answer, add_special_tokens=False)
        reply.append(tiny_tokenizer.eos_token_id)
        assert trained[: len(prompt) + len(reply)] == prompt + reply
        mask = sample["loss_mask"][len(prompt) : len(prompt) + len(reply)]
        assert mask.all()


def test_streamed_text_is_the_answer(tiny_tokenizer, parrot, capsys):
    chat = make_chat(tiny_tokenizer, parrot)
    for question, answer in TALK:
        chat.ask(question)
        assert capsys.readouterr().out == answer + "\n"
    assert [m["content"] for m in chat.history.messages[1::2]] == [answer for _, answer in TALK]


def test_control_characters_of_an_answer_stay_off_the_terminal(tiny_tokenizer, parrot, capsys):
    unsafe = [chr(n) for n in (*range(9), *range(11, 32), *range(127, 160))]
    unsafe += ["\x1b]0;title\x07", "\u202e", "\u2028"]
    answer = "a\tb\n" + "|".join(unsafe)
    chat = make_chat(tiny_tokenizer, parrot, answers=[answer])
    chat.ask("x")
    out = capsys.readouterr().out
    assert set(out) <= {chr(n) for n in range(32, 127)} | {"\t", "\n"}
    assert "\\u001b]0;title\\u0007" in out
    assert "a\tb\n" in out
    assert chat.history.messages[1]["content"] == answer


@pytest.mark.parametrize("text", ["🙂🙂 a", "line\n" * 60 + "end", "\n\n", "é", "中文" * 30])
def test_stream_never_shows_half_a_character(tiny_tokenizer, text):
    pieces = []
    stream = TextStream(tiny_tokenizer, {tiny_tokenizer.eos_token_id}, pieces.append)
    import torch

    stream.put(torch.tensor([[1, 2, 3]]))
    for token in tiny_tokenizer.encode(text, add_special_tokens=False):
        stream.put(torch.tensor([token]))
    stream.put(torch.tensor([tiny_tokenizer.eos_token_id]))
    stream.end()
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)


def test_commands(tiny_tokenizer, parrot, capsys):
    chat = make_chat(tiny_tokenizer, parrot, system="S")
    assert chat.command("/undo")
    chat.ask("one")
    chat.ask("two")
    chat.command("/undo")
    assert [m["content"] for m in chat.history.all()] == ["S", "one", TALK[0][1]]
    chat.command("/reset")
    assert chat.history.all() == [{"role": "system", "content": "S"}]
    chat.command("/system T")
    assert chat.history.all() == [{"role": "system", "content": "T"}]
    chat.command("/help")
    assert "/save FILE" in capsys.readouterr().err
    assert not chat.command("/quit")


def test_undone_turn_is_not_seen_again(tiny_tokenizer, parrot):
    chat = make_chat(tiny_tokenizer, parrot)
    chat.ask("a")
    chat.command("/undo")
    chat.ask("a")
    assert chat.engine.model.seen[0] == chat.engine.model.seen[1]


def test_saving_adds_lines_and_refuses_other_files(tiny_tokenizer, parrot, tmp_path):
    chat = make_chat(tiny_tokenizer, parrot)
    with pytest.raises(DataError, match="nothing to save"):
        chat.command(f"/save {tmp_path / 'a.jsonl'}")
    chat.ask("x")
    chat.command(f"/save {tmp_path / 'a.jsonl'}")
    chat.command(f"/save {tmp_path / 'a.jsonl'}")
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    assert rows[0]["messages"][0] == {"role": "user", "content": "x"}
    (tmp_path / "notes.txt").write_text("my notes\n")
    with pytest.raises(DataError, match="not a messages file"):
        chat.command(f"/save {tmp_path / 'notes.txt'}")
    assert (tmp_path / "notes.txt").read_text() == "my notes\n"


@pytest.fixture
def interruptible():
    """Ctrl-C means KeyboardInterrupt, also where a shell started the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_stops_one_answer_which_is_then_not_trained(
    tiny_tokenizer, parrot, tmp_path, capsys
):
    chat = make_chat(tiny_tokenizer, parrot, answers=["cut short", "whole"])
    generate = chat.engine.model.generate

    def interrupted(**options):
        os.kill(os.getpid(), signal.SIGINT)
        chat.engine.model.stop = False
        return generate(**options)

    chat.engine.model.generate = interrupted
    chat.ask("first")
    assert "[stopped]" in capsys.readouterr().err
    chat.engine.model.generate = generate
    chat.engine.model.stop = True
    chat.ask("second")
    chat.command(f"/save {tmp_path / 'a.jsonl'}")
    sample = training_ids(tmp_path / "a.jsonl", tiny_tokenizer, tmp_path)
    trained = sample["input_ids"][sample["loss_mask"] > 0].tolist()
    assert trained == [*tiny_tokenizer.encode("whole"), tiny_tokenizer.eos_token_id]
    with pytest.raises(KeyboardInterrupt):  # outside of an answer it is an interrupt again
        os.kill(os.getpid(), signal.SIGINT)


def test_reasoning_that_the_template_opens_is_kept_whole(tiny_tokenizer, parrot):
    import copy

    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "assistant\\n' }}{% endif %}", "assistant\\n<think>\\n' }}{% endif %}"
    )
    chat = make_chat(tokenizer, parrot, answers=["why\n</think>\nbecause"])
    chat.ask("q")
    assert chat.history.messages[1]["content"] == "<think>\nwhy\n</think>\nbecause"


def test_stop_tokens_come_from_model_run_tokenizer_and_template(tiny_tokenizer, parrot):
    model = parrot(tiny_tokenizer, [])
    model.generation_config.eos_token_id = [7, 9]
    engine = Engine(model, tiny_tokenizer, stop_ids=[5])
    end = tiny_tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert engine.stop_ids == (5, 7, 9, end)


@pytest.mark.parametrize(
    ("options", "own", "wanted"),
    [
        ({}, {}, {"do_sample": False, "temperature": None}),
        ({"temperature": 0.5}, {}, {"do_sample": True, "temperature": 0.5}),
        ({}, {"do_sample": True, "top_p": 0.8}, {"do_sample": True, "top_p": 0.8}),
        ({"top_k": 0}, {"do_sample": True, "top_k": 20}, {"do_sample": True, "top_k": 0}),
        ({"greedy": True}, {"do_sample": True, "top_p": 0.8}, {"do_sample": False, "top_p": None}),
        ({"num_beams": 3}, {"do_sample": True}, {"do_sample": False, "num_beams": 3}),
        ({"max_new_tokens": 9}, {"max_length": 20}, {"max_new_tokens": 9, "max_length": None}),
    ],
)
def test_sampling_options_go_over_the_models_own(options, own, wanted):
    from transformers import GenerationConfig

    config = SamplingOptions(**options).generation_config(GenerationConfig(**own), [1, 2], 0)
    assert {key: getattr(config, key) for key in wanted} == wanted
    assert config.eos_token_id == [1, 2]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": float("inf")},
        {"repetition_penalty": float("inf")},
        {"top_p": 1.5},
        {"top_k": -1},
        {"num_beams": 0},
        {"max_new_tokens": 0},
        {"repetition_penalty": 0.0},
        {"greedy": True, "temperature": 1.0},
    ],
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(RecipeError):
        SamplingOptions(**options)


@pytest.mark.parametrize(
    "own",
    [
        {"repetition_penalty": 0},
        {"repetition_penalty": "much"},
        {"temperature": -1.0},
        {"temperature": 0.0, "do_sample": True},
        {"top_p": 5.0},
        {"top_k": -3},
        {"min_p": 7.0},
        {"typical_p": 2.0},
        {"no_repeat_ngram_size": -1},
    ],
)
def test_a_models_settings_that_no_answer_comes_of_are_refused_before_any(
    own, tiny_qwen2, tmp_path
):
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    config = GenerationConfig()
    for name, value in own.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen2)
    model.generation_config = config
    with pytest.raises(ModelError, match=next(iter(own))):
        Engine(model, AutoTokenizer.from_pretrained(tiny_qwen2))
    copy = shutil.copytree(tiny_qwen2, tmp_path / "m")
    (copy / "generation_config.json").write_text(json.dumps(own))
    with pytest.raises(ModelError):
        stop_token_ids(ModelOptions(str(copy)))


def test_settings_that_cannot_be_read_are_not_passed_over(tiny_qwen2, tmp_path):
    copy = shutil.copytree(tiny_qwen2, tmp_path / "m")
    (copy / "generation_config.json").write_text('{"eos_token_id": [1,')
    with pytest.raises(ModelError, match="generation settings cannot be read"):
        load_engine(find_model(str(copy)))


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"bad_words_ids": [[99999]]}, "99999"),
        ({"exponential_decay_length_penalty": [1]}, "index"),
        ({"num_return_sequences": 3, "do_sample": True}, None),
        ({"repetition_penalty": 1, "temperature": 1, "do_sample": True, "top_p": 1}, None),
        ({"return_dict_in_generate": True}, None),
    ],
)
def test_settings_that_fail_while_it_writes_are_named(own, said, tiny_qwen2):
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(tiny_qwen2)
    model.generation_config = GenerationConfig(**own)
    engine = Engine(model, AutoTokenizer.from_pretrained(tiny_qwen2))
    with pytest.raises(ModelError, match=said) if said else nullcontext():
        engine.answer_batch([TextRow("", prompt="ab")], SamplingOptions(max_new_tokens=2))
