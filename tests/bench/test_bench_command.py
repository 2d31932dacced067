"""Tools watched from outside: the lines of their steps, and what they are given."""

import itertools
import json
import sys
from pathlib import Path

import pytest

from trainkit.bench import command as bench
from trainkit.bench.providers import Shape

TINY = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
SAYS = """
import sys, time
print("Loading", flush=True)
for step, wait in enumerate([0.5, 0.1, 0.1, 0.3, 0.3, 0.3]):
    time.sleep(wait)
    print("{'loss': '%.2f', 'grad_norm': '0.5'}" % (9 - step), flush=True)
print({"train_loss": 7.0}, flush=True)
time.sleep(600)
"""


@pytest.fixture
def work(tmp_path):
    return bench.Work(tmp_path, Shape("llama", TINY, batch_size=2, length=16), "lora", 6)


def tool_that(monkeypatch, script):
    tool = bench.Tool("json", lambda work, output: [sys.executable, "-c", script])
    monkeypatch.setattr(bench, "TOOLS", {"a tool": tool})


def test_a_tool_is_timed_by_the_lines_of_its_steps_and_ended_behind_the_last(work, monkeypatch):
    tool_that(monkeypatch, SAYS)
    row = bench.measure("a tool", work)
    assert (row["loss"], row["last_loss"]) == (9.0, 4.0)
    assert 290 < row["ms"] < 600  # the second half of the steps, on a machine that may be busy
    assert row["tokens_per_second"] == pytest.approx(32 / row["ms"] * 1e3)
    assert row["first_step_seconds"] > 0.5


def test_a_tool_that_fails_says_why(work, monkeypatch):
    tool_that(monkeypatch, "raise SystemExit('no such option: --max_length')")
    assert "no such option" in bench.measure("a tool", work)["error"]


def test_trainkit_and_the_trainer_are_given_the_same(work):
    bench.prepare(work.folder, work.shape, work.steps)
    rows = (work.folder / "rows" / "rows.jsonl").read_text().splitlines()
    assert [len(json.loads(row)["input_ids"]) for row in rows] == [16] * 12
    words = bench.TOOLS["trl"].command(work, work.folder / "trl")
    given = dict(itertools.pairwise(words))
    for name, value in work.settings.items():
        assert given[f"--{name}"] == str(value)
    command = bench.TOOLS["trainkit"].command(work, work.folder / "run")
    recipe = json.loads(Path(command[command.index("--config") + 1]).read_text())
    assert recipe["training"] == work.settings
    assert recipe["lora"]["r"] == int(given["--lora_r"])


def test_trainkit_is_measured_from_its_command(work):
    bench.prepare(work.folder, work.shape, work.steps)
    row = bench.measure("trainkit", work)
    assert "error" not in row, row
    assert row["ms"] > 0
    assert row["loss"] == pytest.approx(5.7, abs=0.3)  # ln 300, before anything is learnt
