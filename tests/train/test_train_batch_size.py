"""Out of memory: all ranks stop and say why, or go on with fewer rows at a time, the same curve."""

import json
import math

import pytest
from project import project
from ranks import run_ranks
from train.shortage_cases import without_memory

from trainkit.cli.app import main
from trainkit.train.faults.shortage import smaller

__all__ = ["project"]
WORDS = ("r.yaml", "model.dtype=float32", "lora=null", "training.max_steps=6")
FIND = ("training.auto_find_batch_size=true", "training.gradient_accumulation_steps=2")


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr("trainkit.run.report.draw_plots", lambda *_: [])
    monkeypatch.setattr("trainkit.run.report.svg_plots", lambda *_: [])


def curve(project, run):
    rows = map(json.loads, (project.root / run / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows if "loss" in row]


# A gradient of these runs is the sum of at most 8 * 64 products, in fp32. In another order either
# sum is off by the root of their number roundings; each of 6 steps adds its own to the weights.
ANOTHER_ORDER = 2 * math.sqrt(8 * 64) * 2**-24 * math.sqrt(6)


def close(curve):
    return [pytest.approx(row, rel=ANOTHER_ORDER, abs=ANOTHER_ORDER) for row in curve]


def test_half_of_a_micro_batch_divides_it():
    assert [smaller(rows) for rows in (1, 2, 3, 6, 7, 8, 9, 12)] == [None, 1, 1, 3, 1, 4, 3, 6]


def test_one_process_finds_the_rows_that_fit_and_keeps_the_curve(project, monkeypatch, capsys):
    monkeypatch.chdir(project.root)
    assert main(["sft", *WORDS, *FIND, "--output-dir", "whole"]) == 0
    expected = curve(project, "whole")
    with without_memory(1):  # tried before the first step: 4, 2, 1
        assert main(["sft", *WORDS, *FIND, "--output-dir", "tried"]) == 0
    assert curve(project, "tried") == close(expected)
    assert "goes back to step 0 with training.per_device_train_batch_size=1" in (
        capsys.readouterr().err
    )
    shown = (project.root / "tried" / "resolved.yaml").read_text()
    assert "per_device_train_batch_size: 1  # found by the run" in shown
    assert "gradient_accumulation_steps: 8  # found by the run" in shown
    with without_memory(2, from_step=3):  # met in step 4: back to checkpoint-2
        assert main(["sft", *WORDS, *FIND, "--output-dir", "met"]) == 0
    assert curve(project, "met") == close(expected)
    assert "goes back to step 2 with training.per_device_train_batch_size=2" in (
        capsys.readouterr().err
    )
    overrides = [each["overrides"] for each in project.starts("met")]
    assert overrides[1] == [
        "training.per_device_train_batch_size=2",
        "training.gradient_accumulation_steps=4",
    ]
    with without_memory(2):  # a continued run takes what was found
        assert main(["sft", "--resume", "met/checkpoint-4"]) == 0
    assert curve(project, "met") == close(expected)


def test_packed_rows_of_two_ranks_keep_the_curve_too(project):
    """Met in a later step and continued."""
    words = [*WORDS, *FIND, "data.packing=true", "training.max_steps=4"]
    case = {"world_size": 2, "cwd": str(project.root), "on_rank": 1, "row_tokens": 64}
    assert project.sft(*words, "--output-dir", "whole", num_ranks=2).code == 0
    expected = curve(project, "whole")
    argv = [*words, "--output-dir", "met"]
    ranks = run_ranks("train.shortage_cases:sft", argv=argv, most_rows=2, from_step=2, **case)
    assert [found for found, _, _ in ranks] == [1, 1], ranks
    assert project.sft("--resume", "met", num_ranks=2).code == 0
    assert curve(project, "met") == close(expected)


@pytest.mark.parametrize("finds", [False, True])
def test_a_rank_without_memory_stops_all_of_them(project, finds):
    words = [*WORDS, *(FIND if finds else FIND[1:]), "--output-dir", "run"]
    shortage = {"most_rows": 2, "from_step": 3, "on_rank": 1}
    ranks = run_ranks(
        "train.shortage_cases:sft", world_size=2, cwd=str(project.root), argv=words, **shortage
    )
    assert [code for code, _, _ in ranks] == [1, 1]
    status = json.loads((project.root / "run" / "status.json").read_text())
    assert status["state"] == "failed"
    for part in ("rank 1", "out of memory in step 4", "4 x ", "lengths ", "d.jsonl", "weights 0."):
        assert part in status["reason"]
        assert part in ranks[1][2] or part == "rank 1"
    if not finds:
        assert "per_device_train_batch_size" in ranks[1][2]
        return
    assert "--resume" in ranks[1][2]
    continued = project.sft("--resume", "run", num_ranks=2)
    assert continued.code == 0
    assert "per_device_train_batch_size: 4 -> 2" in continued.err
    assert [step for step, _, _ in curve(project, "run")] == [1, 2, 3, 4, 5, 6]


def test_ranks_try_together_before_the_first_step(project):
    words = [*WORDS, *FIND, "--output-dir", "run", "parallel.shard=zero2"]
    ranks = run_ranks(
        "train.shortage_cases:sft",
        world_size=2,
        cwd=str(project.root),
        argv=words,
        most_rows=1,
        on_rank=1,
    )
    assert [code for code, _, _ in ranks] == [0, 0]
    assert "per_device_train_batch_size: 1  # found by the run" in (
        (project.root / "run" / "resolved.yaml").read_text()
    )


def test_the_rank_that_needs_the_most_is_recorded(project):
    words = [*WORDS[:-1], "training.max_steps=1", "parallel.shard=fsdp2", "--output-dir", "run"]
    case = {"cwd": str(project.root), "argv": words, "memory_gib": 80, "peaks_gib": [1.0, 90.0]}
    ranks = run_ranks("train.shortage_cases:sft_on_gpus", world_size=2, **case)
    assert [code for code, _, _ in ranks] == [0, 0]
    kept = json.loads((project.root / "run" / "memory.json").read_text())
    assert kept["measured"]["first_step_gib"] == kept["measured"]["peak_gib"] == 90.0
    assert kept["estimated"]["gpus"] == 2
    assert "90.0 GiB measured in the first step" in ranks[0][2]
    case |= {"memory_gib": 0.01, "argv": [*words[:-1], "another"]}
    refused = run_ranks("train.shortage_cases:sft_on_gpus", world_size=2, **case)
    assert [code for code, _, _ in refused] == [1, 1]
    assert "--force" in refused[0][2]
