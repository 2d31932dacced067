"""Shards that others have made or could have changed are not unpickled."""

import os

import pytest

from trainkit.checkpoint.whole.manifest import refuse_foreign
from trainkit.errors import CheckpointError


@pytest.fixture
def checkpoint(tmp_path):
    shards = tmp_path / "run" / "checkpoint-1" / "global_step1"
    shards.mkdir(parents=True)
    (shards / "mp_rank_00_model_states.pt").write_bytes(b"x")
    for path in (shards.parent.parent, shards.parent, shards, *shards.iterdir()):
        path.chmod(0o755)
    return shards.parent


def test_mine_is_accepted(checkpoint):
    refuse_foreign(checkpoint)


@pytest.mark.parametrize(
    "place", [".", "..", "global_step1", "global_step1/mp_rank_00_model_states.pt"]
)
@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_writable_by_others_is_refused(checkpoint, place, mode):
    (checkpoint / place).chmod(mode)
    with pytest.raises(CheckpointError, match="writable by others"):
        refuse_foreign(checkpoint)


def test_of_another_user_is_refused(checkpoint, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    owner = checkpoint.stat().st_uid
    if owner == 0:  # as root every file is root's, whom all users trust
        os.chown(checkpoint / "global_step1" / "mp_rank_00_model_states.pt", 54321, 54321)
    with pytest.raises(CheckpointError, match="belongs to user"):
        refuse_foreign(checkpoint)


def test_link_is_refused(checkpoint, tmp_path):
    (tmp_path / "evil.pt").write_bytes(b"x")
    (checkpoint / "global_step1" / "more.pt").symlink_to(tmp_path / "evil.pt")
    with pytest.raises(CheckpointError, match="link"):
        refuse_foreign(checkpoint)


def test_sticky_parent_is_accepted(checkpoint):
    checkpoint.parent.chmod(0o1777)
    refuse_foreign(checkpoint)
