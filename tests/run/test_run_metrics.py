import contextlib
import errno
import json
import resource

import pytest
from commands import python

from trainkit.errors import RunDirectoryError
from trainkit.run import MetricsWriter, read_metrics
from trainkit.run.files import DiskFullError, write_text_atomic


def test_rows_are_readable_while_the_run_goes_and_in_the_designed_order(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.append({"loss": float("nan"), "extra": 1, "step": 1, "epoch": 0.5})
    assert list(read_metrics(path)[0]) == ["step", "epoch", "loss", "extra"]
    # Strict JSON: a reader in another language must not stumble over NaN.
    json.loads(path.read_text(), parse_constant=pytest.fail)
    assert read_metrics(path)[0]["loss"] == "NaN"
    writer.close()
    writer.close()


@pytest.mark.parametrize(
    "row", [{"loss": 1.0}, {"step": 1.5}, {"step": 1, "x": [1]}, {"step": True}]
)
def test_a_row_that_is_not_flat_is_refused(tmp_path, row):
    with (
        contextlib.closing(MetricsWriter(tmp_path / "m.jsonl")) as writer,
        pytest.raises(RunDirectoryError),
    ):
        writer.append(row)


def test_rows_behind_a_deleted_file_go_into_a_new_one_with_a_word(tmp_path, caplog):
    with contextlib.closing(MetricsWriter(tmp_path / "m.jsonl")) as writer:
        writer.append({"step": 1, "loss": 1.0})
        (tmp_path / "m.jsonl").unlink()
        for step in (2, 3):
            writer.append({"step": step, "loss": 1.0})
    assert [row["step"] for row in read_metrics(tmp_path / "m.jsonl")] == [2, 3]
    assert caplog.text.count("its rows before step 2 are lost") == 1


def test_resume_sets_the_redone_rows_aside_and_drops_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with contextlib.closing(MetricsWriter(path)) as writer:
        for step in range(1, 11):
            writer.append({"step": step, "loss": 1.0})
    path.write_bytes(path.read_bytes() + b'{"step": 11, "lo')
    with contextlib.closing(MetricsWriter(path, resume_step=6)) as writer:
        writer.append({"step": 7, "loss": 2.0})
    assert [(row["step"], row["loss"]) for row in read_metrics(path)][-2:] == [(6, 1.0), (7, 2.0)]
    superseded = read_metrics(tmp_path / "metrics.superseded.jsonl")
    assert [row["step"] for row in superseded] == [7, 8, 9, 10]
    MetricsWriter(path, resume_step=0).close()
    assert read_metrics(path) == []
    assert len(read_metrics(tmp_path / "metrics.superseded.jsonl")) == 11


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from trainkit.run import MetricsWriter
from trainkit.run.files import DiskFullError, write_text_atomic
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder = Path(sys.argv[1])
write_text_atomic(folder / "report.html", "old")
writer = MetricsWriter(folder / "metrics.jsonl")
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
step = 0
try:
    while True:
        step += 1
        writer.append({"step": step, "loss": 1.0})
except DiskFullError as error:
    print(step, error)
try:
    write_text_atomic(folder / "report.html", "new" * 1000)
except DiskFullError as error:
    print(error)
"""


def test_a_full_disk_is_explained_and_leaves_whole_files(tmp_path):
    # In its own process: the limit holds for every file a process writes.
    said = python("-c", FULL_DISK, tmp_path)
    first = said.splitlines()[0]
    steps = [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert steps == list(range(1, int(first.split()[0])))
    assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"}\n")
    assert (tmp_path / "report.html").read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "report.html"]
    assert said.count("no space left") == 2
    assert "free some space" in said


def test_other_failures_are_named_too(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(RunDirectoryError, match="cannot be written") as caught:
        write_text_atomic(tmp_path / "x", "y")
    assert not isinstance(caught.value, DiskFullError)
    assert list(tmp_path.iterdir()) == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 1000
