"""The cache when things go wrong: killed with its workers, read-only, full."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from chats import chat

import trainkit.data
from trainkit.data import sources as preparing
from trainkit.data import store
from trainkit.data.store import ARRAYS
from trainkit.errors import DataError

SCRIPT = """
import sys
from tiny import make_tokenizer
from trainkit.data import DataOptions, Ledger, Source, prepare
options = DataOptions(cache_dir=sys.argv[2], num_workers=2)
prepare([Source(sys.argv[1])], make_tokenizer(), options, ledger=Ledger())
"""


def start(path, directory):
    tests = str(Path(__file__).parent.parent)
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(path), str(directory)],
        env={**os.environ, "PYTHONPATH": tests, "TOKENIZERS_PARALLELISM": "false"},
        start_new_session=True,
    )


def processes_of(session):
    """The processes of a session, by /proc."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(entry.parent.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_killed_run_takes_its_workers_along_and_the_next_one_starts(tmp_path, ready):
    """Workers that outlive their parent would hold the lock, and the next run would wait."""
    path, directory = tmp_path / "x.jsonl", tmp_path / "cache"
    row = json.dumps(chat("question " * 40, "answer " * 40))
    path.write_text("\n".join([row] * 60_000))
    first = start(path, directory)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(processes_of(first.pid)) < 3:
        time.sleep(0.05)
    assert len(processes_of(first.pid)) == 3
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and processes_of(first.pid):
        time.sleep(0.05)
    left = processes_of(first.pid)
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert not left
    path.write_text("\n".join([row] * 500))
    assert len(ready(path, cache_dir=str(directory), num_workers=2)) == 500


def test_a_worker_whose_run_was_killed_before_it_began_ends(monkeypatch):
    ended = []
    monkeypatch.setattr(preparing.os, "getppid", lambda: 1)
    monkeypatch.setattr(preparing.os, "_exit", ended.append)
    monkeypatch.setattr(preparing.ctypes, "CDLL", lambda _: SimpleNamespace(prctl=lambda *_: 0))
    preparing._die_with(os.getpid())
    assert ended == [1]


@pytest.fixture
def five(write, ready):
    """Prepare the same five rows."""
    path = write([chat("q", "a")] * 5)
    return lambda **options: ready(path, **options)


def test_a_directory_that_cannot_be_written(five, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"/file(.|\n)*data\.cache_dir"):
        five(cache_dir=str(tmp_path / "file" / "cache"))


def test_a_full_disk(five, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"No space left(.|\n)*data\.cache_dir"):
        five()
    monkeypatch.undo()
    assert not list((tmp_path / "cache").glob("tmp-*"))
    assert len(five()) == 5


def test_a_read_only_cache_that_has_the_data_is_enough(five, monkeypatch):
    """A shared cache made by somebody else: nothing has to be written to open it."""
    five()

    def read_only(*_, **__):
        raise OSError(30, "Read-only file system")

    for name in ("mkdir", "write_text", "rename", "replace"):
        monkeypatch.setattr(Path, name, read_only)
    assert five().summary["sources"][0]["cached"]


@pytest.mark.parametrize("damage", ["overwritten", "cut", "gone"])
@pytest.mark.parametrize("name", [*(f"{array}.npy" for array in ARRAYS), "meta.json"])
def test_a_damaged_store_is_named_and_prepared_again(name, damage, five, tmp_path, caplog):
    """Overwritten tokens would be trained without a word."""
    made = five()
    want = [made[at]["input_ids"].tolist() for at in range(5)]
    (file,) = (tmp_path / "cache").glob(f"*/{name}")
    if damage == "overwritten":
        file.write_bytes(file.read_bytes()[:-1] + b"\x07")
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-9])
    else:
        file.unlink()
    data = five()
    assert not data.summary["sources"][0]["cached"]
    assert [data[at]["input_ids"].tolist() for at in range(5)] == want
    is_said = "is damaged" in caplog.text
    assert is_said == ((name, damage) != ("meta.json", "gone"))  # that is no store at all
    assert five().summary["sources"][0]["cached"]


def test_what_a_killed_process_left_goes_with_the_next_one(five, tmp_path):
    five()
    (meta,) = (tmp_path / "cache").glob("*/meta.json")
    meta.unlink()
    left = tmp_path / "cache" / f"tmp-{meta.parent.name}-{socket.gethostname()}-1"
    left.mkdir()
    five()
    assert not left.exists()


def test_every_module_that_makes_samples_decides_which_cache_is_used(monkeypatch):
    """A cache of other code would serve its masks: one changed byte anywhere is another cache."""
    before, seen = store.code_digest(), []
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: seen.append(path) or read(path))
    assert store.code_digest() == before
    package = Path(trainkit.data.__file__).parent
    makers = ("messages", "masking", "template", "builder")
    assert {package / f"{file}.py" for file in makers} <= set(seen)
    assert set(seen) == set(package.rglob("*.py"))
