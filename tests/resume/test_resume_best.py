"""A run judged by its evaluations, stopped at any of them: best model and end stay the same.

Every case ends with the bytes of the run that was never stopped.
"""

import shutil
import signal

import pytest
from project import make_project
from resume.record import record
from tiny import chat_lines

from trainkit.errors import PREEMPTED

# Others than the training rows, so that their loss soon gets no better.
ANSWERS = [[f"Q{number}", "zz" * (number % 5 + 1) + str(number)] for number in range(9)]
JUDGED = (
    "lora=null",
    "model.dtype=float32",
    "data.eval=[e.jsonl]",
    "early_stopping={patience: 2}",
    "training.max_steps=14",
    "training.eval_steps=2",
    "training.load_best_model_at_end=true",
    "training.save_total_limit=1",
)


@pytest.fixture(scope="module")
def judged(tmp_path_factory, tiny_llama):
    """A project with a whole run ``whole``, its best step and its last."""
    project = make_project(tmp_path_factory.mktemp("judged"), tiny_llama)
    (project.root / "e.jsonl").write_text(chat_lines(ANSWERS))
    project.sft("--config", "r.yaml", *JUDGED, "--output-dir", "whole").well()
    rows = record(project.root / "whole")["metrics"]
    losses = {row["eval_loss"]: row["step"] for row in rows if "eval_loss" in row}
    best, end = losses[min(losses)], max(losses.values())
    assert end == best + 4 < 14  # twice no better
    return project, best, end


def stop(project, name, step):
    arguments = ("--config", "r.yaml", *JUDGED, "--output-dir", name)
    said = project.sft(*arguments, stop_at=step, number=signal.SIGTERM)
    assert said.code == PREEMPTED, said.err
    assert (project.root / name / f"checkpoint-{step}").is_dir()  # transformers keeps the best only


def goes_on_as_whole(project, name):
    project.sft("--resume", name).well()
    assert record(project.root / name) == record(project.root / "whole")


@pytest.mark.parametrize("at", ["best", "end"])
def test_an_evaluation_that_is_made_up_for_decides_what_any_other_does(judged, at):
    """The best model, and that the run ends: without one step more."""
    project, best, end = judged
    stop(project, at, best if at == "best" else end)
    goes_on_as_whole(project, at)


def test_the_best_checkpoint_moves_with_its_run(judged):
    project, best, _ = judged
    stop(project, "before", best + 1)
    (project.root / "before").rename(project.root / "after")
    goes_on_as_whole(project, "after")


def test_a_best_checkpoint_that_is_gone_is_told(judged):
    project, best, _ = judged
    stop(project, "gone", best + 1)
    shutil.rmtree(project.root / f"gone/checkpoint-{best}")
    last = project.sft("--resume", "gone")
    assert last.code == 0
    said = " ".join((last.out + last.err).split())
    assert f"checkpoint-{best}, the best so far, is gone" in said


def test_figures_without_a_loss_are_made_up_for(judged):
    """At a step at which nothing but answers is due, and at the last."""
    project, *_ = judged
    measured = (
        "lora=null",
        "generation_eval={data: [e.jsonl], every: 2, max_new_tokens: 2, max_samples: 2}",
        "data.eval=[e.jsonl]",
        "training.max_steps=6",
        "training.eval_steps=4",
    )

    def rows(name):
        found = record(project.root / name)["metrics"]
        return [{k: v for k, v in row.items() if k != "eval_seconds"} for row in found]

    command = ("--config", "r.yaml", *measured, "--output-dir")
    assert project.sft(*command, "answered").code == 0
    arguments = (*command, "asked")
    for step in (2, 6):
        assert project.sft(*arguments, stop_at=step, number=signal.SIGTERM).code == PREEMPTED
        arguments = ("--resume", "asked")
    assert project.sft(*arguments).code == 0
    assert rows("asked") == rows("answered")
