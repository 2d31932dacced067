"""Checkpoints of a Python that pickles members of enumerations by ``getattr``, as 3.11.2 does."""

import enum
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorProperties

from trainkit.checkpoint.weights.contents import open_pickle
from trainkit.errors import CheckpointError
from trainkit.parallel.part_files import read_table
from trainkit.parallel.zero.shard_files import ShardFiles


@pytest.fixture
def by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickle as those versions do."""
    monkeypatch.setattr(
        enum.Enum, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name))
    )


class _Asks:
    """A pickle that asks for an attribute."""

    def __init__(self, *of: Any) -> None:
        self.of = of

    def __reduce__(self) -> Any:
        return getattr, self.of


def test_a_shard_is_read(by_name: None, tmp_path: Path) -> None:
    path = tmp_path / "optim_states.pt"
    torch.save({"stage": ZeroStageEnum.weights, "sum": torch.ones(2)}, path)
    assert b"getattr" in path.read_bytes()
    assert ShardFiles().load(str(path))["stage"] is ZeroStageEnum.weights
    assert open_pickle(path)["sum"].tolist() == [1.0, 1.0]


def test_a_table_of_parts_is_read(by_name: None, tmp_path: Path) -> None:
    properties = TensorProperties(torch.float32)
    table = Metadata({}, {"kept": properties}, {}, StorageMeta())
    (tmp_path / ".metadata").write_bytes(pickle.dumps(table))
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    assert read_table(tmp_path).planner_data["kept"].dtype is torch.float32


@pytest.mark.parametrize(
    "of",
    [
        (ZeroStageEnum, "__class__"),
        (ZeroStageEnum, "mro"),
        (torch.Size, "count"),
        (ZeroStageEnum.weights, "name"),
    ],
    ids=str,
)
def test_nothing_else_is_looked_up(of: Any, tmp_path: Path) -> None:
    path = tmp_path / "optim_states.pt"
    torch.save(_Asks(*of), path)
    with pytest.raises(CheckpointError):
        ShardFiles().load(str(path))
    if of[0] is not ZeroStageEnum:  # which is not itself there, and whose members nobody needs
        with pytest.raises(CheckpointError):
            open_pickle(path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Asks(*of)))
    with pytest.raises(CheckpointError):
        read_table(tmp_path)
