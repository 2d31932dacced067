"""The loader of streamed batches: errors with their words, positions only for as many processes."""

import itertools
import os
import signal
from types import SimpleNamespace

import pytest
from tiny import chat_lines

from trainkit.data import DataOptions, Source
from trainkit.data.collator import PackingCollator
from trainkit.data.streaming import SampleStream
from trainkit.errors import CheckpointError, DataError
from trainkit.train.data import StreamLoader, StreamState


def conversation(number):
    return chat_lines([(f"q{number}", f"a{number}")])


@pytest.fixture
def make(tmp_path, tiny_tokenizer):
    """A state and its loader over 200 rows, of which some are broken."""

    def make(num_workers=0, writes=True, **options):
        path = tmp_path / "x.jsonl"
        lines = [conversation(n) if n % 20 else "{broken" for n in range(200)]
        path.write_text("\n".join(lines))
        stream = SampleStream(
            [Source(str(path))],
            tiny_tokenizer,
            DataOptions(max_length=128, **options),
            packing=True,
            buffer=30,
        )
        state = StreamState(
            stream,
            tmp_path / "dropped.jsonl",
            num_slots=max(num_workers, 1),
            dist_rank=0,
            world_size=1,
            writes=writes,
        )
        args = SimpleNamespace(
            train_batch_size=2,
            seed=0,
            dataloader_num_workers=num_workers,
            dataloader_prefetch_factor=2,
            dataloader_pin_memory=False,
        )
        loader = StreamLoader(state, PackingCollator(128, 0), args)
        return state, loader

    return make


def ids(batches):
    return [batch["input_ids"].tolist() for batch in batches]


def test_of_the_ranks_that_share_rows_one_writes_what_became_of_them(make, tmp_path):
    state, loader = make(writes=False)
    running = iter(loader)
    assert len(ids(itertools.islice(running, 45))) == 45
    assert state.num_dropped == 10
    state.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_go_on_behind_the_last_one_taken(make, tmp_path, num_workers):
    """However far the processes are ahead, and whichever of them was next."""
    _, loader = make(num_workers)
    whole = ids(itertools.islice(iter(loader), 45))
    lines = (tmp_path / "dropped.jsonl").read_text()
    assert lines.count("\n") == 10
    (tmp_path / "dropped.jsonl").unlink()
    state, loader = make(num_workers)
    running = iter(loader)
    assert ids(itertools.islice(running, 7)) == whole[:7]
    state.save(tmp_path)
    assert len(list(itertools.islice(running, 9))) == 9  # then the process is killed
    state, loader = make(num_workers)
    state.load(tmp_path)
    assert ids(itertools.islice(iter(loader), 38)) == whole[7:]
    assert (tmp_path / "dropped.jsonl").read_text() == lines


def test_an_error_in_a_process_keeps_its_words(make):
    _, loader = make(2, max_dropped=1)
    with pytest.raises(DataError, match="more than max_dropped 1") as caught:
        list(itertools.islice(iter(loader), 50))
    assert "Traceback" not in str(caught.value)


def test_a_dead_process_is_an_error_that_says_so(make, monkeypatch):
    state, loader = make(1)
    monkeypatch.setattr(state.stream, "rows", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(DataError, match="loads streamed data died"):
        next(iter(loader))


def test_positions_fit_the_number_of_processes(make, tmp_path):
    state, _ = make(2)
    with pytest.raises(CheckpointError, match="does not say where the stream was"):
        state.load(tmp_path)
    state.save(tmp_path)
    other, _ = make(1)
    with pytest.raises(CheckpointError, match="2 loading processes"):
        other.load(tmp_path)


def test_a_finished_run_that_is_resumed_does_no_more_steps(make, tmp_path, monkeypatch):
    import source_loss_cases

    from trainkit.data.streaming import FirstRows
    from trainkit.objectives.objective import CountingCollator, TrainingData

    state, _ = make()
    held = TrainingData(
        FirstRows(state.stream.first(10)[0], packing=True),
        CountingCollator(PackingCollator(128, 0), lambda rows: 0),
        lambda row: row,
        stream=state.stream,
    )
    monkeypatch.setattr(source_loss_cases, "make_data", lambda **_: held)
    options = {"packed": True, "max_steps": 3, "save_strategy": "steps", "save_steps": 3}
    trainer = source_loss_cases.make_trainer(tmp_path, **options)
    trainer.train()
    assert trainer.state.global_step == 3
    again = source_loss_cases.make_trainer(tmp_path, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert again.state.global_step == 3
    assert not [
        row for row in again.state.log_history[len(trainer.state.log_history) :] if "loss" in row
    ]


@pytest.mark.parametrize(
    "content",
    ['{"positions": [{"epoch": 0, "read": 3}], "next_slot": 0}', "{", '{"next_slot": 1}', "[]"],
    ids=["another version's", "cut", "without positions", "a list"],
)
def test_a_position_of_another_format_is_named(content, make, tmp_path):
    state, _ = make()
    (tmp_path / "stream_rank0.json").write_text(content)
    with pytest.raises(CheckpointError, match="not one that this version of trainkit reads"):
        state.load(tmp_path)
