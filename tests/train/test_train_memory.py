"""The estimate in a run: refused, forced, recorded, corrected; and a step without memory."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import chat_lines

from trainkit.cli.app import main
from trainkit.estimate.estimate import estimate
from trainkit.estimate.gpus import GPUS
from trainkit.estimate.peak import peak
from trainkit.estimate.plan import Plan
from trainkit.estimate.recipe import plan_of
from trainkit.estimate.shape import find_shape
from trainkit.recipe import load_recipe
from trainkit.run import Console
from trainkit.train import log as meter
from trainkit.train import memory
from trainkit.train.faults import shortage
from trainkit.train.loop import Loop

RECIPE = """\
model: {{name_or_path: "{model}", dtype: float32}}
data: {{train: [train.jsonl], max_length: 64, cache_dir: cache}}
training: {{per_device_train_batch_size: 2, max_steps: 4, save_strategy: "no"}}
"""


@pytest.fixture
def project(tmp_path, tiny_qwen2, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(RECIPE.format(model=tiny_qwen2))
    text = chat_lines(("Say it.", f"It is {n}.") for n in range(12))
    (tmp_path / "train.jsonl").write_text(text)
    return tmp_path


def _has(monkeypatch, gib, *, suggests=False):
    gpu = replace(GPUS["h100"], memory_gib=gib)
    monkeypatch.setattr(meter, "this_gpu", lambda: gpu)
    if not suggests:  # each way out takes a recorded step
        monkeypatch.setattr("trainkit.estimate.estimate.suggest", lambda *_: [])


def test_what_cannot_fit_is_refused_before_the_run_directory(project, monkeypatch, capsys):
    _has(monkeypatch, 0.01)
    assert main(["sft", "small.yaml", "--output-dir", "run"]) == 1
    said = capsys.readouterr().err
    assert "GiB of 0.0 GiB (h100)" in said
    assert "--force" in said
    assert not (project / "run").exists()


def test_what_nobody_has_counted_is_a_warning(project, monkeypatch, capsys):
    _has(monkeypatch, 0.01)
    assert (
        main(["sft", "small.yaml", "--output-dir", "run", "model.attn_implementation=eager"]) == 0
    )
    assert "may run out of memory" in capsys.readouterr().err


def test_what_the_refusal_suggests_is_taken(project, monkeypatch, capsys):
    """As a user: refused, the first suggestion typed behind the command, trained."""
    rows = "training.per_device_train_batch_size={}"
    small = plan_of(load_recipe(project / "small.yaml", [rows.format(16)]).recipe, 1)
    _has(monkeypatch, peak(small).needed_gib, suggests=True)
    words = ["sft", "small.yaml", rows.format(160)]
    assert main([*words, "--output-dir", "run"]) == 1
    fix = capsys.readouterr().err.partition("fix:")[2]
    cure = re.split(r" \(\d", fix.strip())[0].split()
    assert cure
    assert all("=" in each for each in cure)
    assert main([*words, *cure, "--output-dir", "run", "training.max_steps=1"]) == 0
    assert json.loads((project / "run" / "memory.json").read_text())["estimated"]["fits"]


@pytest.mark.parametrize(
    ("share", "is_continued", "said"),
    [
        (1.0, False, ""),
        (1.04, False, "corrected"),
        (1.0, True, ""),  # its states are there, so it takes more
        (0.9, False, "corrected"),
        (9.0, False, "may run out of memory"),
    ],
)
def test_the_first_step_is_held_against_a_first_step(share, is_continued, said, monkeypatch):
    """AdamW makes its states at its end: 8 bytes a weight less until then, and nothing is wrong."""
    plan = Plan(find_shape("qwen2-0.5b"), 4, 2048)
    found = estimate(plan, GPUS["h100"])
    first = peak(plan, is_first=True).gib
    assert first < found.peak.gib - 3
    told = io.StringIO()
    size = int(share * (found.peak.gib if is_continued else first) * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: size)
    run = SimpleNamespace(
        expected=found,
        recipe=SimpleNamespace(data=SimpleNamespace(packing=True)),
        process=SimpleNamespace(world_size=1, is_main=False),
        console=Console(stream=told, interactive=False),
        directory=None,
    )
    loop = SimpleNamespace(run=run)
    record = memory.MemoryRecord()
    record.begin(loop, Path("checkpoint") if is_continued else None)
    record.on_step_end(loop)
    text = " ".join(told.getvalue().split())
    assert said in text if said else not text


def test_force_goes_on_and_the_run_keeps_estimate_and_measurement(project, monkeypatch, capsys):
    _has(monkeypatch, 0.01)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**30)
    assert main(["sft", "small.yaml", "--output-dir", "run", "--force"]) == 0
    said = capsys.readouterr().err
    kept = json.loads((project / "run" / "memory.json").read_text())
    assert kept["estimated"]["peak_gib"] > 0
    assert kept["measured"]["first_step_gib"] == kept["measured"]["peak_gib"] == 3.0
    assert kept["measured"]["step_seconds"] > 0
    assert "3.0 GiB measured in the first step" in said
    assert "Memory and time" in (project / "run" / "report.html").read_text()


def test_on_a_cpu_nothing_is_said(project, capsys):
    assert main(["sft", "small.yaml", "--output-dir", "run"]) == 0
    assert "memory:" not in capsys.readouterr().err
    assert not (project / "run" / "memory.json").exists()
    assert "Memory and time" not in (project / "run" / "report.html").read_text()


@pytest.mark.parametrize("known", [True, False])
def test_out_of_memory_names_the_batch_the_owners_and_the_cure(project, monkeypatch, capsys, known):
    if known:
        _has(monkeypatch, 80)
    plain, calls = Loop.micro_loss, []

    def micro_loss(self, *arguments, **options):
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has")
        return plain(self, *arguments, **options)

    monkeypatch.setattr(Loop, "micro_loss", micro_loss)
    assert main(["sft", "small.yaml", "--output-dir", "run"]) == 1
    said = capsys.readouterr().err
    for part in ("in step 3", "2 x ", "lengths ", "weights 0.0", "optimizer 0.0", "2 GiB"):
        assert part in said
    assert "per_device_train_batch_size" in said
    assert json.loads((project / "run" / "status.json").read_text())["state"] == "failed"


def test_owners_are_the_tensors_bytes():
    weight = torch.nn.Parameter(torch.zeros(1024, 1024, dtype=torch.bfloat16))
    master = torch.nn.Parameter(weight.detach().float())
    master.grad = torch.zeros_like(master)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.tied = weight, weight

    optimizer = torch.optim.AdamW([master])
    optimizer.step()
    trainer = type("Trainer", (), {"model": Model(), "optimizer": optimizer})
    found = {owner: gib * 2**10 for owner, gib in shortage.owners_of(trainer).items()}
    assert found == pytest.approx(
        {"weights": 2, "masters": 4, "gradients": 4, "optimizer": 8}, abs=0.001
    )


def test_lengths_of_a_batch():
    tokens = torch.ones(3, 8, dtype=torch.long)
    mask = torch.ones(3, 8, dtype=torch.long)
    mask[1, 5:] = 0
    assert shortage.lengths_of({"input_ids": tokens, "attention_mask": mask}) == ([8, 5, 8], 8)
    assert shortage.lengths_of({"input_ids": tokens}) == ([8, 8, 8], 8)
    assert shortage.lengths_of(None) == ([], 0)
