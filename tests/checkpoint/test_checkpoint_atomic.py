"""Directories appear complete or not at all: kills, full disks, altered bytes."""

import json
import os
import random
import resource
import shutil
import signal
import textwrap
from pathlib import Path

import pytest
from commands import python

from trainkit.checkpoint.whole import atomic
from trainkit.checkpoint.whole.manifest import MANIFEST_NAME
from trainkit.errors import CheckpointError


def write_small(folder: Path, seed: int = 0) -> None:
    generator = random.Random(seed)
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "weights.bin").write_bytes(generator.randbytes(4096))
    (folder / "deep" / "er" / "state.json").write_text('{"step": 1}')
    (folder / "empty").write_bytes(b"")


def make(target: Path, seed: int = 0, **options) -> Path:
    with atomic.staged_directory(target, **options) as staging:
        write_small(staging, seed)
    return target


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_whole_directory_appears_and_verifies(tmp_path):
    metadata, target = {}, tmp_path / "runs" / "checkpoint-1"
    with atomic.staged_directory(target, metadata=metadata) as staging:
        write_small(staging)
        metadata["step"] = 1  # may be filled while it is written
    manifest = atomic.verify_directory(target)
    assert manifest.metadata == {"step": 1}
    assert [entry.path for entry in manifest.files] == [
        "deep/er/state.json",
        "empty",
        "weights.bin",
    ]
    assert names(target.parent) == {"checkpoint-1"}


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit(3)])
def test_exception_leaves_nothing(tmp_path, error):
    def save():
        with atomic.staged_directory(tmp_path / "a") as staging:
            (staging / "x").write_text("x")
            raise error

    with pytest.raises(type(error)):
        save()
    assert names(tmp_path) == set()


@pytest.mark.parametrize("exchange", [True, False])
def test_existing_target_is_refused_or_swapped(tmp_path, exchange, monkeypatch):
    target = make(tmp_path / "a", seed=1)
    with pytest.raises(CheckpointError, match="exists already"):
        make(target, seed=2)
    before = (target / "weights.bin").read_bytes()
    if not exchange:
        monkeypatch.setattr(atomic.ctypes, "CDLL", lambda *_, **__: object())
    make(target, seed=2, replace=True)
    assert (target / "weights.bin").read_bytes() != before
    atomic.verify_directory(target)
    assert names(tmp_path) == {"a"}


def test_place_where_nothing_can_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(CheckpointError, match="cannot be made"),
        atomic.staged_directory(tmp_path / "file" / "x"),
    ):
        pass


def contents(directory):
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_a_swap_in_two_steps_keeps_the_old_files_until_the_new_ones_are_there(
    tmp_path, monkeypatch
):
    target = make(tmp_path / "a", seed=1)
    before = contents(target)
    monkeypatch.setattr(atomic.ctypes, "CDLL", lambda *_, **__: object())
    plain = Path.rename

    def rename(self, other):
        if self.name.startswith(".a.staging"):
            raise OSError(5, "the host is gone")
        return plain(self, other)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match="the host is gone"):
        make(target, seed=2, replace=True)
    assert before in [contents(path) for path in tmp_path.iterdir()]


def test_ranks_share_the_work(tmp_path):
    target = tmp_path / "checkpoint-2"
    staging = atomic.stage(target)
    (staging / "rank0").write_bytes(b"0" * 10)
    (staging / "rank1").write_bytes(b"1" * 10)
    recorded = atomic.record_files(staging, ["rank1"])
    atomic.commit(staging, target, recorded=recorded)
    assert [entry.path for entry in atomic.verify_directory(target).files] == ["rank0", "rank1"]


def test_file_changed_after_it_was_recorded_is_refused(tmp_path):
    staging = atomic.stage(tmp_path / "a")
    (staging / "rank1").write_bytes(b"1" * 10)
    recorded = atomic.record_files(staging, ["rank1"])
    (staging / "rank1").write_bytes(b"1" * 11)
    with pytest.raises(CheckpointError, match="rank1 is missing or has changed"):
        atomic.commit(staging, tmp_path / "a", recorded=recorded)
    atomic.discard(staging)
    assert names(tmp_path) == set()


def test_link_in_the_staging_directory_is_refused(tmp_path):
    (tmp_path / "secret").write_text("s")
    with (
        pytest.raises(CheckpointError, match="link"),
        atomic.staged_directory(tmp_path / "a") as staging,
    ):
        (staging / "x").symlink_to(tmp_path / "secret")
    assert names(tmp_path) == {"secret"}


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda d: (d / "weights.bin").unlink(), "weights.bin is missing"),
        (lambda d: (d / "extra").write_text("x"), "extra is not in the manifest"),
        (lambda d: (d / "weights.bin").write_bytes(bytes(4096)), "weights.bin was altered"),
        (lambda d: os.truncate(d / "weights.bin", 100), "100 bytes instead of 4096\\s+fix: put"),
        (lambda d: (d / MANIFEST_NAME).unlink(), "manifest.json is missing"),
        (lambda d: (d / MANIFEST_NAME).write_text("{"), "manifest.json is damaged"),
        (lambda d: (d / MANIFEST_NAME).write_text("[" * 100_000), "manifest.json is damaged"),
        (lambda d: (d / "l").symlink_to("/etc/passwd"), "link"),
        (lambda d: os.mkfifo(d / "pipe"), "special file"),
    ],
)
def test_damage_is_named(tmp_path, damage, word):
    target = make(tmp_path / "a")
    damage(target)
    with pytest.raises(CheckpointError, match=word):
        atomic.verify_directory(target)


def test_rewritten_manifest_is_not_believed(tmp_path):
    target = make(tmp_path / "a", metadata={"step": 1})
    path = target / MANIFEST_NAME
    path.write_text(path.read_text().replace('"step": 1', '"step": 2'))
    with pytest.raises(CheckpointError, match="altered"):
        atomic.verify_directory(target)


def test_random_faults_are_all_found(tmp_path):
    """Byte flips, truncations, zero pages, deletions, additions."""
    pristine = make(tmp_path / "pristine", metadata={"step": 3, "note": "x" * 50})
    generator = random.Random(1)
    files = [path for path in sorted(pristine.rglob("*")) if path.is_file()]
    for trial in range(250):
        victim = tmp_path / "victim"
        shutil.copytree(pristine, victim)
        path = victim / generator.choice(files).relative_to(pristine)
        content = bytearray(path.read_bytes())
        kind = generator.choice(["flip", "truncate", "zero", "delete", "append", "add"])
        if kind == "flip" and content:
            content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
            path.write_bytes(content)
        elif kind == "truncate" and content:
            os.truncate(path, generator.randrange(len(content)))
        elif kind == "zero" and content:
            start = generator.randrange(len(content))
            content[start : start + 64] = bytes(len(content[start : start + 64]))
            path.write_bytes(content)
        elif kind == "delete":
            path.unlink()
        elif kind == "append":
            path.write_bytes(bytes(content) + b"\n")
        else:
            (victim / "deep" / f"extra{trial}").write_bytes(b"")
        with pytest.raises(CheckpointError):
            atomic.verify_directory(victim)
        shutil.rmtree(victim)


def test_newest_valid_skips_the_damaged_with_reasons(tmp_path):
    assert atomic.newest_valid(tmp_path).path is None
    for step in (5, 20, 100):
        make(tmp_path / f"checkpoint-{step}", seed=step, metadata={"step": step})
    (tmp_path / "checkpoint-100" / "weights.bin").unlink()
    (tmp_path / "checkpoint-300").mkdir()
    make(tmp_path / "checkpoint-20-kept-400", seed=1)  # a user's own copy
    found = atomic.newest_valid(tmp_path)
    assert found.path == tmp_path / "checkpoint-20"
    assert found.manifest.metadata == {"step": 20}
    assert [path.name for path, _ in found.skipped] == ["checkpoint-300", "checkpoint-100"]
    assert "weights.bin is missing" in found.skipped[1][1]


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path):
    mine = atomic.stage(tmp_path / "a")
    python("-c", CHILD_STAGES, tmp_path / "b")
    assert len([name for name in names(tmp_path) if name.startswith(".b.staging")]) == 2
    atomic.stage(tmp_path / "c")
    assert not any(name.startswith(".b.staging") for name in names(tmp_path))
    assert mine.is_dir()


@pytest.mark.parametrize("owner", [{"start": "1"}, {"host": "elsewhere", "pid": 1}], ids=str)
def test_a_leftover_goes_whose_pid_was_used_again_and_one_of_another_host_after_a_day(
    tmp_path, owner
):
    staging = atomic.stage(tmp_path / "a")
    owner_file = staging.with_name(staging.name + ".owner")
    owner_file.write_text(json.dumps({**json.loads(owner_file.read_text()), **owner}))
    if "host" in owner:
        assert atomic.clean_leftovers(tmp_path) == []
        os.utime(owner_file, (0, 0))
    assert atomic.clean_leftovers(tmp_path) == [staging]
    assert names(tmp_path) == set()


def test_remove_directory(tmp_path):
    atomic.remove_directory(make(tmp_path / "a"))
    assert names(tmp_path) == set()


def test_free_space_check(tmp_path):
    assert atomic.free_space_check(tmp_path / "not" / "yet", 1) > 0
    with pytest.raises(CheckpointError, match="GiB are needed"):
        atomic.free_space_check(tmp_path, 1 << 60)


def test_what_a_killed_process_has_left_makes_room(tmp_path, monkeypatch):
    left = tmp_path / f".x.trash-{32 * '0'}"
    left.mkdir()
    usage = shutil.disk_usage(tmp_path)
    free = lambda _: usage._replace(free=1 if left.exists() else 1000)  # noqa: E731
    monkeypatch.setattr(atomic.shutil, "disk_usage", free)
    assert atomic.free_space_check(tmp_path / "out", 1) == 1
    assert left.exists()
    assert atomic.free_space_check(tmp_path / "out", 500) == 1000
    assert not left.exists()


def test_small_sizes_are_not_told_as_nothing(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=600_000)
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match=r"1\.91 MiB are needed and 0\.57 MiB are free"):
        atomic.free_space_check(tmp_path, 2_000_000)


def test_everything_is_forced_to_the_disk_before_the_rename(tmp_path, monkeypatch):
    """Power may fail after the rename: files, folders and manifest go first, the parent last."""
    events = []
    fsync, rename = os.fsync, Path.rename

    def watched_fsync(descriptor):
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def watched_rename(path, target):
        events.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(Path, "rename", watched_rename)
    with atomic.staged_directory(tmp_path / "t") as staging:
        write_small(staging)
    before, after = events[: events.index("rename")], events[events.index("rename") + 1 :]
    files, folders = {"weights.bin", "state.json", "empty"}, {"deep", "er", staging.name}
    assert set(before) == files | folders | {MANIFEST_NAME}
    assert max(before.index(name) for name in files) < before.index(MANIFEST_NAME)
    assert after == [tmp_path.name]


def test_full_disk_keeps_the_previous_directory(tmp_path):
    """RLIMIT_FSIZE makes the kernel refuse a write as a full disk does."""
    target = make(tmp_path / "a", seed=1)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
        with (
            pytest.raises(CheckpointError, match="disk is full"),
            atomic.staged_directory(target, replace=True) as staging,
        ):
            (staging / "big").write_bytes(bytes(1 << 17))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    atomic.verify_directory(target)
    assert names(tmp_path) == {"a"}


CHILD_STAGES = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from trainkit.checkpoint.whole import atomic
    (atomic.stage(Path(sys.argv[1])) / "x").write_text("half")
    """
)
