"""What a run needs on the disk is known before its first step."""

import shutil
from types import SimpleNamespace

import pytest

from trainkit.errors import CheckpointError
from trainkit.train.saves import checkpoint_bytes, expected_bytes, refuse_small_disk


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("optim", ["adamw_torch", "sgd", "adafactor"])
def test_the_room_for_a_checkpoint_is_what_it_takes(lab, dtype, optim):
    """Files have headers and names of a few KB besides; a tiny model's adafactor keeps rows too."""
    trainer = lab.trainer("run", dtype=dtype, optim=optim, max_steps=1, save_steps=1)
    expected = expected_bytes(trainer)
    trainer.train()
    folder = lab.root / "run" / "checkpoint-1"
    written = sum((folder / name).stat().st_size for name in ("model.safetensors", "optimizer.pt"))
    assert checkpoint_bytes(trainer) == pytest.approx(written, abs=40_000)
    assert expected == pytest.approx(written, rel=0.05, abs=40_000)


def test_a_disk_that_is_too_small_is_refused_with_the_numbers(lab, monkeypatch):
    trainer = lab.trainer("run")
    refuse_small_disk(trainer, lab.root)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=2 << 20))
    monkeypatch.setattr("trainkit.train.saves.weight_bytes", lambda trainer: 3 << 30)
    with pytest.raises(CheckpointError, match=r"the final model 3\.00 GiB; 2\.00 MiB are") as said:
        refuse_small_disk(trainer, lab.root)
    assert "--output-dir" in str(said.value)
    assert "save_only_model=true" in str(said.value)


def test_the_first_save_is_not_begun_either(lab, monkeypatch):
    """No earlier checkpoint tells how large it is."""
    trainer = lab.trainer("run", max_steps=2, save_steps=2)
    trainer.checkpoints.needed = lambda: checkpoint_bytes(trainer)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1000))
    with pytest.raises(CheckpointError, match=r"are needed and 0\.00 MiB are free"):
        trainer.train()
    assert not list((lab.root / "run").glob("checkpoint-*"))
