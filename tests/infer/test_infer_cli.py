"""The commands chat and generate, as a user types them."""

import io
import json
import shutil

import pytest
from tiny import make_adapter

from trainkit.cli.app import main


@pytest.fixture
def talk(monkeypatch, capsys):
    """Run a chat with lines on its standard input; returns exit code, stdout, stderr."""

    def run(arguments, lines):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        code = main(["chat", *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_chat_on_a_run(run_directory, talk, tmp_path):
    saved = tmp_path / "saved.jsonl"
    arguments = [str(run_directory), "--max-new-tokens", "5", "--greedy", "--device", "cpu"]
    lines = ["hello", "again", "/undo", f"/save {saved}", "/quit", "never seen"]
    code, out, err = talk(arguments, lines)
    assert code == 0
    assert out.count("\n") >= 2
    assert "taken back" in err
    (row,) = [json.loads(line) for line in saved.read_text().splitlines()]
    assert [m["role"] for m in row["messages"]] == ["user", "assistant"]
    assert row["messages"][1]["content"] in out


def test_chat_ends_with_its_input_and_survives_a_bad_command(run_directory, talk):
    code, _, err = talk([str(run_directory), "--device", "cpu"], ["/nonsense", "/save /no/dir/x"])
    assert code == 0
    assert "/reset" in err
    assert "error:" in err


def test_chat_seed_and_sampling(run_directory, talk):
    arguments = [str(run_directory), "--max-new-tokens", "8", "--temperature", "3", "--seed", "4"]
    first, second = talk(arguments, ["x"])[1], talk(arguments, ["x"])[1]
    assert first == second != talk([*arguments[:-1], "5"], ["x"])[1]


def test_chat_with_an_adapter_that_resized_the_vocabulary(tiny_qwen2, talk, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_qwen2)
    model.resize_token_embeddings(model.config.vocab_size + 5, mean_resizing=False)
    make_adapter(model, tmp_path / "a", ["q_proj"])
    code, _, err = talk([str(tmp_path / "a"), "--max-new-tokens", "2"], ["hi"])
    assert code == 0, err


def test_chat_with_adapter_and_beams(tiny_qwen2, talk, tmp_path):
    make_adapter(tiny_qwen2, tmp_path / "a", ["q_proj"])
    beams = ["--beams", "2", "--max-new-tokens", "4"]
    assert talk([str(tiny_qwen2), "--adapter", str(tmp_path / "a"), *beams], ["hi"])[0] == 0
    assert talk([str(tmp_path / "a"), *beams], ["hi"])[0] == 0


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["nowhere/at/all"], "nothing at this path"),
        (["{run}", "--temperature", "0"], "--temperature"),
        (["{run}", "--greedy", "--top-p", "0.5"], "--greedy"),
        (["{run}", "--adapter", "nowhere"], "adapter"),
        (["{run}", "--device", "banana"], "'banana' is no device"),
        (["{run}", "--device", "cuda:99"], "cuda:99: torch finds"),
    ],
)
def test_bad_chat_commands_exit_with_a_sentence(run_directory, talk, arguments, word):
    code, _, err = talk([part.format(run=run_directory) for part in arguments], [])
    assert code in (1, 2)
    assert word in err
    assert "Traceback" not in err


def test_an_answer_that_fills_the_context_says_so(tiny_qwen2, talk, tmp_path):
    run = tmp_path / "narrow"
    shutil.copytree(tiny_qwen2, run)
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 24}))
    _, _, err = talk([str(run)], ["hi"])
    assert "context is full" in err
    assert "--max-new-tokens" not in err


def test_generate_counts_what_has_no_whole_answer(run_directory, tmp_path, capsys):
    config = run_directory / "final/config.json"
    short = {**json.loads(config.read_text()), "max_position_embeddings": 64}
    config.write_text(json.dumps(short))
    rows = [{"prompt": "a"}, {"prompt": "b" * 99}, {"prompt": "c"}]
    prompts, out = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["generate", str(run_directory), "--prompts", str(prompts), "--no-verify"]
    command += ["--max-new-tokens", "2", "--too-long", "drop"]
    assert main([*command, "--output", str(prompts)]) == 2
    assert "the place of the questions" in capsys.readouterr().err
    assert main([*command, "--output", str(out)]) == 0
    said = capsys.readouterr().out
    assert "2 answers" in said
    assert "1 questions too long" in said
    assert main([*command, "--output", str(out), "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    counts = {"num_answers": 2, "num_too_long": 1, "num_cut": 2}
    assert {key: row[key] for key in counts} == counts


def test_generate_and_generate_again(run_directory, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c"}\n')
    command = ["generate", str(run_directory), "--prompts", str(tmp_path / "p.jsonl")]
    command += ["--out", str(tmp_path / "o.jsonl"), "--max-new-tokens", "4", "--batch-size", "2"]
    assert main([*command, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["num_answers"], row["num_found"]) == (3, 0)
    assert len((tmp_path / "o.jsonl").read_text().splitlines()) == 3
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_found"] == 3
    assert main(["5" if word == "4" else word for word in command]) == 2
    assert "other options" in capsys.readouterr().err


def test_model_that_was_trained_on_is_another_model(run_directory, tmp_path, capsys):
    """The same path with other weights must not be taken for the model of the answers so far."""
    from safetensors.torch import load_file, save_file

    (tmp_path / "p.txt").write_text("one\n")
    options = ["--prompts", str(tmp_path / "p.txt"), "--out", str(tmp_path / "out.jsonl")]
    command = ["generate", str(run_directory), *options, "--max-new-tokens", "2"]
    assert main(command) == main(command) == 0
    weights = run_directory / "final" / "model.safetensors"
    tensors = {name: tensor * 1.5 for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    assert main(command) == 2
    assert "another model" in capsys.readouterr().err


def test_stop_tokens_of_the_run_end_an_answer(tiny_qwen2):
    """A token recorded as end of turn stops generation, though nothing else names it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trainkit.infer.engine import Engine
    from trainkit.infer.sampling import SamplingOptions

    model = AutoModelForCausalLM.from_pretrained(tiny_qwen2).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen2)
    model.lm_head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size)
    with torch.no_grad():  # a model that says token 65 whatever it reads
        model.lm_head.weight.zero_()
        model.lm_head.bias.zero_()[65] = 9
    question, nine = [{"role": "user", "content": "x"}], SamplingOptions(max_new_tokens=9)
    answer = Engine(model, tokenizer, stop_ids=[65]).answer(question, nine)
    assert (answer.finish, answer.text, answer.output_ids) == ("stop", "", (65,))
    answer = Engine(model, tokenizer).answer(question, nine)
    assert (answer.finish, len(answer.output_ids)) == ("length", 9)
