"""Parts of a checkpoint are read without running what is in them."""

import io
import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

from trainkit.errors import CheckpointError
from trainkit.parallel.part_files import FOLDER, check_parts, load_parts, read_table


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("hostile-code-ran",)


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = {"model": {"a": torch.arange(6.0)}, "options": {"lr": 0.5, "betas": (0.9, 0.99)}}
    dcp.save(state, checkpoint_id=tmp_path / FOLDER, no_dist=True)
    return tmp_path


def test_what_is_written_is_read(checkpoint):
    check_parts(checkpoint)
    state = {"model": {"a": torch.zeros(6)}, "options": {"lr": 0.0, "betas": (0.0, 0.0)}}
    load_parts(state, checkpoint)
    assert state["model"]["a"].tolist() == [0, 1, 2, 3, 4, 5]
    assert state["options"] == {"lr": 0.5, "betas": (0.9, 0.99)}


def test_a_checkpoint_without_parts_has_nothing_to_look_at(tmp_path):
    check_parts(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (pickle.dumps(Hostile()), "mkdir"),
        (pickle.dumps({"a": 1}), "damaged or hostile"),
        (b"\x80\x04", "damaged or hostile"),
        (b"", "damaged or hostile"),
    ],
)
def test_a_table_that_is_none_is_refused(content, said, checkpoint):
    (checkpoint / FOLDER / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=said):
        check_parts(checkpoint)
    assert not (checkpoint / "hostile-code-ran").exists()


@pytest.mark.parametrize("name", ["../other.pt", "/etc/passwd", "gone.distcp"])
def test_a_table_that_leads_elsewhere_is_refused(name, checkpoint):
    table = read_table(checkpoint / FOLDER)
    for info in table.storage_data.values():
        info.relative_path = name
    (checkpoint / FOLDER / ".metadata").write_bytes(pickle.dumps(table))
    with pytest.raises(CheckpointError, match="not a file of this folder"):
        check_parts(checkpoint)


def test_a_value_that_is_code_is_refused(checkpoint):
    table = read_table(checkpoint / FOLDER)
    hostile = io.BytesIO()
    torch.save(Hostile(), hostile)
    (checkpoint / FOLDER / "more.distcp").write_bytes(hostile.getvalue())
    for index, info in table.storage_data.items():
        if index.fqn == "options.lr":
            info.relative_path, info.offset = "more.distcp", 0
            info.length = len(hostile.getvalue())
    (checkpoint / FOLDER / ".metadata").write_bytes(pickle.dumps(table))
    state = {"model": {}, "options": {"lr": 0.0}}
    with pytest.raises((CheckpointError, dcp.api.CheckpointException), match="damaged or hostile"):
        load_parts(state, checkpoint)
    assert not (checkpoint / "hostile-code-ran").exists()
