"""``trainkit verify-resume``: it kills where it says, sees a difference, and leaves nothing."""

import json
import shutil

import pytest
import torch
from project import project
from ranks import RankFailure, run_ranks
from safetensors.torch import save_file

from trainkit.cli.app import main
from trainkit.train import rehearse as module
from trainkit.train.rehearse import VARIABLE, Verdict, shortened

__all__ = ["project"]


@pytest.fixture
def forked(monkeypatch, project):
    """Starts are forked behind the imports; a list of settings for them."""
    settings = {}

    def run(command, log, plan):
        arguments = {
            "cwd": str(project.root),
            "words": command[command.index("sft") :],
            "environment": {VARIABLE: json.dumps(plan)} if plan else {},
            **settings,
        }
        log.touch()
        try:
            case = "train.rehearsal.rehearsal_cases:start"
            return run_ranks(case, world_size=1, timeout=240, **arguments)[0]
        except RankFailure as error:
            log.write_text(str(error))
            return -9

    monkeypatch.setattr(module, "_run", run)
    monkeypatch.chdir(project.root)
    return settings


def test_a_sound_recipe_ends_with_the_same_bytes(forked, project, capsys):
    before = {path.name for path in project.root.iterdir()} | {"cache"}
    code = main(["verify-resume", "-c", "r.yaml", "lora.dropout=0.1", "--num-ranks", "1", "--json"])
    verdict = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (code, verdict["verdict"]) == (0, "same"), verdict
    whats = [start["what"] for start in verdict["starts"]]
    assert whats[0] == "unbroken"
    assert whats[1].startswith("killed in step")
    assert whats[2:] == ["killed while a checkpoint was written", "resumed to the end"]
    assert all(start["begins_at"] for start in verdict["starts"][2:])
    assert [what.partition(":")[0] for what in verdict["compared"]] == [
        "last checkpoint",
        "final model",
        "metrics",
    ]
    assert {path.name for path in project.root.iterdir()} <= before


def test_what_differs_is_named(tmp_path):
    for name, value in {"whole": 1.0, "broken": 1.5}.items():
        for folder in (f"checkpoint-{module.STEPS}", "final"):
            (tmp_path / name / folder).mkdir(parents=True)
        save_file(
            {"w": torch.ones(3), "v": torch.full((2,), value)},
            tmp_path / name / "final/m.safetensors",
        )
        (tmp_path / name / f"checkpoint-{module.STEPS}/optimizer.pt").write_bytes(b"same")
        row = {"step": 1, "loss": value, "step_seconds": value}
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    verdict = Verdict()
    module._compare(tmp_path / "whole", tmp_path / "broken", verdict)
    assert not verdict.is_same
    assert list(verdict.compared.values()) == [True, False, False]
    assert verdict.differences == [
        "final/m.safetensors: 1 of 2 tensors; at most by 0.5 (v)",
        "metrics.jsonl, step 1: loss 1.0 and 1.5",
    ]
    shutil.rmtree(tmp_path / "broken/final")
    verdict = Verdict()
    module._compare(tmp_path / "whole", tmp_path / "broken", verdict)
    assert "final/m.safetensors: only one of the runs has it" in verdict.differences


def test_a_recipe_is_shortened_and_keeps_its_numbers(project):
    (project.root / "r.yaml").write_text(
        (project.root / "r.yaml").read_text() + "global_batch_size: 64\n"
    )
    found = shortened(project.root / "r.yaml", [])
    assert "global_batch_size=null" in found
    assert "training.eval_strategy=no" in found
    assert not [text for text in found if "learning_rate" in text or "dtype" in text]


MEASURES = """
generation_eval: {data: [d.jsonl], every: 2, metrics: [exact_match]}
early_stopping: {patience: 3}
"""
DECIDES = """, eval_strategy: steps, eval_steps: 2, eval_on_start: true,
  metric_for_best_model: answers/exact_match, load_best_model_at_end: true}"""
PLATEAU = """, lr_scheduler_type: reduce_lr_on_plateau, eval_strategy: steps, eval_steps: 4,
  metric_for_best_model: eval_loss}"""


@pytest.mark.parametrize(("sections", "keys"), [(MEASURES, DECIDES), ("", PLATEAU)])
def test_what_is_decided_by_measures_is_shortened_too(project, sections, keys):
    """The measures are left out, and so must be what would miss them."""
    text = (project.root / "r.yaml").read_text().rstrip()
    (project.root / "m.yaml").write_text(text.removesuffix("}") + keys + sections)
    overrides = shortened(project.root / "m.yaml", [])
    project.sft("--config", "m.yaml", *overrides, "training.max_steps=2").well()
