"""Tools watched from outside: the lines of their steps, and what they are given."""

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from trainkit.bench import command as bench
from trainkit.bench import rows
from trainkit.bench.providers import Shape
from trainkit.bench.rows import prepare

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
    prepare(work.folder, work.shape, work.steps, ["lora"])
    lines = (work.folder / "rows" / "rows.jsonl").read_text().splitlines()
    assert [len(json.loads(line)["input_ids"]) for line in lines] == [16] * 12
    words = bench.TOOLS["trl"].command(work, work.folder / "trl")
    given = dict(itertools.pairwise(words))
    for name, value in work.settings.items():
        assert given[f"--{name}"] == str(value)
    command = bench.TOOLS["trainkit"].command(work, work.folder / "run")
    recipe = json.loads(Path(command[command.index("--config") + 1]).read_text())
    assert recipe["training"] == work.settings
    assert recipe["lora"]["r"] == int(given["--lora_r"])


@pytest.mark.sample("images")
@pytest.mark.parametrize("mode", ["lora", "dpo_helpsteer", "images"])
def test_trainkit_is_measured_from_its_command(mode, work, monkeypatch):
    small = {"depth": 1, "hidden_size": 32, "num_heads": 2, "deepstack_visual_indexes": [0]}
    monkeypatch.setattr(rows, "_VISION", {**small, "intermediate_size": 64})
    monkeypatch.setattr(rows, "_IMAGE_TOKENS", (12, 14))  # two packed rows of 512 a pair of steps
    length = 512 if mode == "images" else 64
    shape = Shape("qwen3", {**TINY, "head_dim": 128}, batch_size=2, length=length)
    work = replace(work, mode=mode, shape=shape)
    prepare(work.folder, work.shape, work.steps, [mode])
    row = bench.measure("trainkit", work)
    assert "error" not in row, row
    rate = {"lora": "tokens", "images": "images"}.get(mode, "pairs")
    assert row[f"{rate}_per_second"] > 0
    # ln 300 or ln 2, before anything is learnt.
    assert row["loss"] == pytest.approx(0.69 if "dpo" in mode else 5.7, abs=0.3)
