"""``callbacks``: a user's own TrainerCallback, by its import path."""

import json
import sys

import pytest

from trainkit.cli.app import main

MODULE = """\
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState


class Halt(TrainerCallback, ExportableState):
    def __init__(self, seen=0):
        self.seen = seen

    def on_step_end(self, args, state, control, model=None, **_):
        assert model is not None
        self.seen += 1
        with open("seen.txt", "a") as file:
            file.write(f"{self.seen}/{state.global_step} ")
        control.should_training_stop |= self.seen == 3

    def state(self):
        return {"args": {}, "attributes": {"seen": self.seen}}


class Plain:
    pass
"""


@pytest.fixture
def sft(tmp_path, tiny_qwen2, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (tmp_path / "mine.py").write_text(MODULE)
    turns = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "It."}]
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps({"messages": turns})] * 10))
    recipe = {
        "model": {"name_or_path": str(tiny_qwen2), "dtype": "float32"},
        "data": {"train": ["rows.jsonl"], "max_length": 64, "packing": False},
        "callbacks": ["mine.Halt"],
        "training": {"per_device_train_batch_size": 1, "save_steps": 2, "learning_rate": 1e-3},
    }
    (tmp_path / "r.json").write_text(json.dumps(recipe))

    def run(*words):
        code = main(["sft", *words])
        return code, " ".join(capsys.readouterr().err.split())

    return run


def test_a_users_callback_sees_each_step_stops_the_run_and_keeps_its_state(sft, tmp_path):
    new = ("--config", "r.json", "--output-dir", "run")
    assert sft(*new, "--dry-run")[0] == 0
    assert not (tmp_path / "seen.txt").exists()  # a rehearsal tells it nothing
    code, said = sft(*new)
    assert code == 0, said
    assert (tmp_path / "seen.txt").read_text() == "1/1 2/2 3/3 "
    assert (tmp_path / "run" / "final").is_dir()
    state = json.loads((tmp_path / "run" / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["Halt"]["attributes"] == {"seen": 2}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("mine.Nothing", "no attribute 'Nothing'"),
        ("yours.Halt", "No module named 'yours'"),
        ("mine.Plain", "is no transformers.TrainerCallback"),
    ],
)
def test_what_is_none_is_refused_before_anything_is_made(sft, tmp_path, name, why):
    code, said = sft("--config", "r.json", "--output-dir", "run", f"callbacks=[{name}]")
    assert code == 2
    assert "callbacks[0]" in said
    assert why in said
    assert not (tmp_path / "run").exists()
