"""Parts of a checkpoint are read without running what is in them."""

import io
import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

from trainkit.errors import CheckpointError
from trainkit.parallel.part_files import (
    FOLDER,
    KEY,
    WITHOUT,
    check_parts,
    empty_state,
    load_parts,
    optimizer_state,
    read_table,
    take_up,
)


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


@pytest.fixture
def trained():
    """A model and an optimizer with a state of all but the bias, and a fresh pair."""

    def made():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
        groups = [{"params": [each], "lr": 0.1} for each in model.parameters()]
        return model, torch.optim.AdamW(groups, weight_decay=0.1)

    model, optimizer = made()
    for parameter in [*model.parameters()][:-1]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer, made


def loaded(model, optimizer, checkpoint):
    room = empty_state(model, optimizer, checkpoint, step=1)
    load_parts({"model": {}, KEY: room}, checkpoint)
    take_up(model, optimizer, room, checkpoint, step=1)


def test_an_optimizers_parts_are_taken_up_whoever_had_no_state(trained, tmp_path):
    model, optimizer, made = trained
    saved = optimizer_state(model, optimizer)
    dcp.save({KEY: saved}, checkpoint_id=tmp_path / FOLDER, no_dist=True)
    other, fresh = made()
    loaded(other, fresh, tmp_path)
    again = optimizer_state(other, fresh)
    assert again["groups"] == saved["groups"]
    assert again[WITHOUT] == saved[WITHOUT] == {"0.weight": ["1.bias"]}
    assert again["state"].keys() == saved["state"].keys() == {"0.weight", "0.bias", "1.weight"}
    for name, entries in saved["state"].items():
        assert all(torch.equal(again["state"][name][key], entries[key]) for key in entries)


def test_parts_of_a_version_that_did_not_say_who_had_no_state_are_taken_up(trained, tmp_path):
    model, optimizer, made = trained
    saved = {k: v for k, v in optimizer_state(model, optimizer).items() if k != WITHOUT}
    dcp.save({KEY: saved}, checkpoint_id=tmp_path / FOLDER, no_dist=True)
    other, fresh = made()
    loaded(other, fresh, tmp_path)
    assert len(fresh.state) == 3


DAMAGES = {
    "missing": lambda state: state["0.bias"].pop("exp_avg"),
    r"0\.bias: the state is missing": lambda state: state.pop("0.bias"),
    r"of shape \[1\]": lambda state: state["0.bias"].update(exp_avg=torch.ones(1)),
    "float16": lambda state: state["0.bias"].update(exp_avg=torch.ones(2).half()),
    "finite": lambda state: state["0.bias"].update(step=torch.tensor(float("nan"))),
    "at most 1": lambda state: state["0.bias"].update(step=torch.tensor(9.0)),
}


@pytest.mark.parametrize("said", DAMAGES)
def test_another_optimizers_parts_are_refused(said, trained, tmp_path):
    model, optimizer, made = trained
    saved = optimizer_state(model, optimizer)
    DAMAGES[said](saved["state"])
    dcp.save({KEY: saved}, checkpoint_id=tmp_path / FOLDER, no_dist=True)
    other, fresh = made()
    with pytest.raises(CheckpointError, match=said):
        loaded(other, fresh, tmp_path)
    assert not fresh.state
