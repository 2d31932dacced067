"""A run that goes back behind a bad step is the run that skips it, also when it is killed."""

import json

from resume.record import record

SPOIL = {"6": "nan", "7": "100"}
WATCHED = ["faults.spike=8", "faults.spike_window=3", "training.logging_steps=1"]


def test_going_back_and_skipping_are_the_same_run(project):
    def sft(*arguments, **options):
        return project.sft(*arguments, spoil=SPOIL, **options)

    skip = ("--config", "r.yaml", *WATCHED, "faults.on_bad_numbers=skip", "-o", "skip")
    whole = sft(*skip).well()
    assert "step 6 is skipped; its batch is kept in" in whole.err
    back = ("--config", "r.yaml", *WATCHED, "faults.on_bad_numbers=roll_back", "-o", "back")
    assert sft(*back, kill_at=7) is None  # after it went back for step 6, and again for step 7
    sft("--resume", "back").well()
    assert record(project.root / "back") == record(project.root / "skip")
    assert [row["passed_over"] for row in project.starts("back") if row["passed_over"]] == [
        [6],
        [7],
    ]
    assert sorted(path.name for path in (project.root / "back/bad_batches").iterdir()) == [
        "step-6",
        "step-7",
    ]
    row = json.loads((project.root / "back/metrics.jsonl").read_text().splitlines()[5])
    assert (row["step"], row["num_skipped_steps"], "loss" in row) == (6, 1, False)


def test_a_run_stops_when_it_went_back_too_often(project):
    """Without a checkpoint it goes back to its beginning."""
    given = ("faults.on_bad_numbers=roll_back", "faults.max_rollbacks=1", "training.save_steps=5")
    said = project.sft("-c", "r.yaml", *given, "-o", "run", spoil={"2": "nan", "3": "inf"})
    assert said.code == 1
    assert "the run goes back to step 0, and leaves step 2 out" in said.err
    assert "loss is inf at step 3" in said.err
    kept = project.root / "run/bad_batches/step-3"
    assert (kept / "weights/adapter_model.safetensors").is_file()
    page = (project.root / "run/report.html").read_text()
    assert "<span class='state failed'>" in page
    assert "loss is inf at step 3" in page
    assert 'http-equiv="refresh"' not in page
