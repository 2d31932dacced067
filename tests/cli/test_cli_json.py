"""Every command has ``--json``: JSON alone on standard output, and an exit code that says how it
went; ``-o`` wherever a result goes somewhere."""

import contextlib
import io
import json
import sys

import pytest
from test_cli_surface import command_lines

from trainkit.cli.app import LazyCommand, main
from trainkit.run import RunDirectory

ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"Say {number}."},
            {"role": "assistant", "content": "5"},
        ]
    }
    for number in range(4)
]
DATA = ("--data", "d.jsonl", "--model", "m")
ANSWERED: dict[tuple[str, ...], tuple[str, ...]] = {
    ("new",): (),
    ("launch",): ("r.yaml", "--print", "torchrun"),
    ("estimate",): ("r.yaml", "--gpu", "24g"),
    ("config", "show"): ("r.yaml",),
    ("config", "schema"): (),
    ("config", "keys"): ("lora",),
    ("data", "preview"): DATA,
    ("data", "check"): DATA,
    ("data", "stats"): DATA,
    ("checkpoint", "verify"): ("runs/a/final",),
    ("chat",): ("m", "--max-new-tokens", "2"),
    ("generate",): ("m", "--prompts", "d.jsonl", "-o", "out.jsonl", "--max-new-tokens", "2"),
    ("runs",): ("runs",),
    ("show",): ("runs/a",),
    ("watch",): ("runs/a",),
    ("compare",): ("runs/a", "runs/b"),
    ("plot",): ("runs/a", "runs/b"),
}
"""Commands that answer in a moment; their own tests have the others."""

VERDICTS = {("checkpoint", "verify"): 1}
"""What is looked at has no manifest, which is an answer too."""

REFUSED: dict[tuple[str, ...], tuple[str, ...]] = {
    ("sft",): ("no.yaml",),
    ("kernels", "check"): ("--op", "no_such_op"),
    ("eval",): ("no/such/model", "--tasks", "boolq"),
    ("merge",): ("no/such/run", "-o", "x"),
    ("verify-resume",): ("no.yaml",),
    ("diagnose",): ("no/such/run",),
    ("doctor",): ("--no-such-option",),
    **{
        ("convert", each): ("no/such/model", "-o", "x")
        for each in ("glm4-to-qwen2", "qwen2-to-glm4")
    },
    **{
        ("export", each): ("no/such/model", "-o", "x") for each in ("gguf", "ollama", "vllm", "fp8")
    },
    ("bench", "step"): ("--no-such-option",),
    ("bench", "lora"): ("--no-such-option",),
    ("bench", "command"): ("--no-such-option",),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_qwen2):
    root = tmp_path_factory.mktemp("place")
    (root / "d.jsonl").write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    (root / "m").symlink_to(tiny_qwen2)
    (root / "r.yaml").write_text("model: {name_or_path: m}\ndata: {train: [d.jsonl]}\n")
    for name in ("a", "b"):
        run = RunDirectory.create_at(root / "runs" / name)
        with contextlib.closing(run.open_metrics()) as metrics:
            for step in (1, 2, 3):
                metrics.append({"step": step, "loss": 3.0 / step, "step_seconds": 0.1})
        run.write_status("done")
        (run.root / "final").symlink_to(tiny_qwen2)
    return root


def test_the_walk_has_every_command():
    lines = set(command_lines())
    groups = {words[:1] for words in lines if len(words) > 1}
    assert {*ANSWERED, *REFUSED} == lines - groups


def _command(words):
    command = LazyCommand(words[0]).load()
    return command.commands[words[1]] if len(words) > 1 else command


@pytest.mark.parametrize("words", [*ANSWERED, *REFUSED], ids=" ".join)
def test_options_are_spelled_alike(words):
    options = {name: param for param in _command(words).params for name in param.opts}
    assert "--json" in options
    places = {"--output", "--output-dir", "--html", "--plot", "--out"} & options.keys()
    assert not places or "-o" in options, f"{places} without -o"


@pytest.mark.parametrize("words", ANSWERED, ids=" ".join)
def test_only_json_on_stdout(words, place, monkeypatch, capfd):
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    code = main([*words, *ANSWERED[words], "--json"])
    said = capfd.readouterr()
    assert code == VERDICTS.get(words, 0), said.err
    lines = said.out.splitlines()
    assert lines
    assert all(isinstance(json.loads(line), dict) for line in lines)


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_a_refusal_leaves_stdout_alone(words, place, monkeypatch, capfd):
    monkeypatch.chdir(place)
    code = main([*words, *REFUSED[words], "--json"])
    said = capfd.readouterr()
    assert code in (1, 2)
    assert said.out == ""
    assert said.err


def test_a_result_goes_to_one_place(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    for given in ((), ("x", "-o", "y")):
        assert main(["merge", "runs/a", *given]) == 2
        assert "-o DIRECTORY" in capsys.readouterr().err
