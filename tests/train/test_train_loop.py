"""The loop: equal losses for every cut, exact resume, whole checkpoints, honest logs."""

import gc
import io
import json
import shutil
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from invariance.parity_cases import adapt
from peft import get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import GenerationConfig, TrainerCallback

from trainkit.checkpoint.whole.manifest import verify_directory
from trainkit.errors import CheckpointError
from trainkit.run import Console
from trainkit.train.checkpoints import find_resume_point
from trainkit.train.faults.numbers import NumberError
from trainkit.train.finish import save_final
from trainkit.train.hooks import KEPT_ROWS
from trainkit.train.log import Rows


def losses(trainer):
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def weights(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def test_the_evaluation_loss_is_the_mean_over_trained_tokens(lab):
    trainer = lab.trainer("run", batch=3)
    trainer.args.per_device_eval_batch_size = 5
    reported = trainer.evaluate()
    total, count = 0.0, 0
    for sample in lab.samples:
        batch = lab.data().collator([sample])
        labels = batch["labels"][0, 1:]
        logits = (
            trainer.model(batch["input_ids"].to(trainer.args.device)).logits[0, :-1].double().cpu()
        )
        keep = labels != -100
        if keep.any():
            total += torch.nn.functional.cross_entropy(
                logits[keep], labels[keep], reduction="sum"
            ).item()
            count += int(keep.sum())
    assert reported["eval_num_trained_tokens"] == count
    assert reported["eval_loss"] == pytest.approx(total / count, rel=1e-6)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_resumed_run_equals_an_unbroken_one_bit_for_bit(lab, dtype):
    """Mid-epoch (ten micro-batches an epoch), with dropout, accumulation and shuffling."""
    options = {
        "batch": 2,
        "accumulate": 2,
        "dropout": 0.1,
        "dtype": dtype,
        "max_steps": 14,
        "save_steps": 6,
        "save_total_limit": 9,
    }
    unbroken = lab.trainer("unbroken", **options)
    unbroken.train()
    resumed = lab.trainer("unbroken", **options)
    torch.manual_seed(99)  # the checkpoint's random state must win
    resumed.train(resume_from_checkpoint=str(lab.root / "unbroken" / "checkpoint-6"))
    assert losses(resumed) == losses(unbroken)
    assert all(
        torch.equal(value, weights(unbroken)[name]) for name, value in weights(resumed).items()
    )
    first, second = unbroken.optimizer.state_dict(), resumed.optimizer.state_dict()
    for key, state in first["state"].items():
        assert all(torch.equal(state[name], second["state"][key][name]) for name in state)


class Seen(TrainerCallback):
    """What a tracker is told: each row, its step and epoch, and how many steps there had been."""

    def __init__(self):
        self.rows, self.steps = [], 0

    def on_step_end(self, args, state, control, **_):
        self.steps = state.global_step

    def on_log(self, args, state, control, logs=None, **_):
        clock = ("seconds", "_runtime", "per_second")
        row = {name: value for name, value in logs.items() if not name.endswith(clock)}
        self.rows.append((state.global_step, state.epoch, self.steps, row))


def logged(lab, name, *, late, **options):
    """Rows of a run on a CPU, or as a GPU's are: one step late."""
    trainer, seen = lab.trainer(name, **options), Seen()
    trainer.add_callback(seen)
    rows = trainer.hook(Rows)
    begin = rows.begin

    def begin_late(*given):
        begin(*given)
        rows.may_wait = late

    rows.begin = begin_late
    return trainer, seen


@pytest.mark.parametrize("every", [1, 2])
def test_rows_that_are_logged_one_step_late_are_the_same_ones(lab, every):
    options = {"logging_steps": every, "save_steps": 3, "eval_strategy": "steps", "eval_steps": 5}
    found = []
    for late in (False, True):
        trainer, seen = logged(lab, f"late-{late}", late=late, max_steps=9, **options)
        trainer.train()
        saved = lab.root / f"late-{late}" / "checkpoint-6" / "trainer_state.json"
        steps = [row["step"] for row in json.loads(saved.read_text())["log_history"]]
        found.append(([(step, epoch, row) for step, epoch, _, row in seen.rows], steps))
        behind = {steps - step for step, _, steps, row in seen.rows if "loss" in row}
        assert behind == ({0, 1} if late else {0})
    assert found[0] == found[1]


def test_the_rows_before_a_failure_are_logged_and_none_of_a_step_that_is_bad(lab):
    class Fails(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == 4:
                raise OSError("the disk is gone")

    trainer, seen = logged(lab, "fails", late=True, save_strategy="no")
    trainer.add_callback(Fails())
    with pytest.raises(OSError, match="gone"):
        trainer.train()
    assert [step for step, *_ in seen.rows] == [1, 2, 3, 4]

    trainer, seen = logged(lab, "bad", late=True, save_strategy="no", learning_rate=1e30)
    with pytest.raises(NumberError) as caught:
        trainer.train()
    assert [step for step, *_ in seen.rows] == list(range(1, caught.value.step))


def test_a_run_that_goes_back_saves_the_adapters_of_its_new_model_and_keeps_no_old_one(lab):
    """It has the engine of the attempt before, and another model; memory must not hold both."""
    first = lab.trainer("first", wrap=adapt, max_steps=1, save_steps=1)
    first.train()
    old, engine = weakref.ref(first.model), first.engine
    engine.forget()
    del first
    gc.collect()
    assert old() is None
    second = lab.trainer("second", wrap=adapt, max_steps=2, save_steps=2)
    second.engine = engine
    engine.receive(second.model, second.args)
    second.train()
    saved = load_file(lab.root / "second" / "checkpoint-2" / "adapter_model.safetensors")
    trained = get_peft_model_state_dict(second.model)
    assert saved.keys() == trained.keys()
    assert all(torch.equal(saved[name], value) for name, value in trained.items())


def test_checkpoints_are_whole_hold_no_pickled_arguments_and_are_thinned_out(lab):
    trainer = lab.trainer("run", save_total_limit=2)
    trainer.train()
    kept = sorted(path.name for path in (lab.root / "run").iterdir())
    assert kept == ["checkpoint-6", "checkpoint-8"]
    manifest = verify_directory(lab.root / "run" / "checkpoint-8")
    assert manifest.metadata == {"step": 8, "run": {"data": "fixed"}, "settings": {}}
    assert not list(lab.root.glob("run/*/training_args.bin"))


def test_thinning_out_leaves_the_best_one(lab):
    trainer = lab.trainer("run", save_steps=2, save_total_limit=2)

    class Best(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            state.best_model_checkpoint = str(lab.root / "run" / "checkpoint-2")

    trainer.add_callback(Best())
    trainer.train()
    names = sorted(path.name for path in (lab.root / "run").glob("checkpoint-*"))
    assert names == ["checkpoint-2", "checkpoint-8"]


def test_resume_passes_over_a_damaged_checkpoint(lab):
    lab.trainer("run").train()
    weights_file = lab.root / "run" / "checkpoint-8" / "model.safetensors"
    damaged = bytearray(weights_file.read_bytes())
    damaged[-1] ^= 1
    weights_file.write_bytes(bytes(damaged))
    point = find_resume_point(lab.root / "run")
    assert point is not None
    assert point.checkpoint.name == "checkpoint-6"
    assert "model.safetensors" in point.skipped[0][1]
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        find_resume_point(weights_file.parent)


def test_a_finished_run_that_is_resumed_trains_no_step_more(lab):
    """Eight steps end amid the first epoch of ten, so its loader has more to give."""
    trainer = lab.trainer("run", save_steps=8)
    trainer.train()
    again = lab.trainer("run", save_steps=8)
    again.train(resume_from_checkpoint=str(lab.root / "run" / "checkpoint-8"))
    assert again.state.global_step == 8
    before = weights(trainer)
    assert all(torch.equal(value, before[name]) for name, value in weights(again).items())


def test_a_continued_run_is_held_to_its_plan(lab):
    from trainkit.train.callbacks import KeepToThePlan

    lab.trainer("run", save_steps=4).train()
    point = find_resume_point(lab.root / "run")
    for steps in (8, 9):
        trainer = lab.trainer("run", max_steps=steps, given={"hooks": [KeepToThePlan()]})
        trainer.run.console = Console(stream=(stream := io.StringIO()))
        trainer.train(resume_from_checkpoint=str(point.checkpoint))
        assert trainer.state.global_step == steps
        assert ("planned for 8 steps and ends at 9 now" in stream.getvalue()) == (steps == 9)


def test_the_final_model_of_a_continued_run_takes_the_place_of_the_old(lab):
    trainer = lab.trainer("run", max_steps=1)
    trainer.train()
    final = lab.root / "run" / "final"
    for step in (1, 2):
        trainer.state.global_step = step
        save_final(trainer, final)
    assert verify_directory(final).metadata["step"] == 2


def test_the_final_model_stops_at_the_trained_ends_and_caches(lab):
    trainer = lab.trainer("run", max_steps=1)
    trainer.model.generation_config.eos_token_id = 7
    trainer.model.config.use_cache = False
    final = lab.root / "run" / "final"
    trainer.run.data = replace(trainer.run.data, stop_token_ids=(5, 6))
    save_final(trainer, final)
    assert GenerationConfig.from_pretrained(final).eos_token_id == [5, 6, 7]
    assert json.loads((final / "config.json").read_text())["use_cache"] is True
    assert trainer.model.config.use_cache is False


def test_rows_count_tokens_of_the_whole_step(lab):
    trainer = lab.trainer("run", batch=2, accumulate=2, max_steps=3)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    order = lab.data(seed=1).samples.order
    for step, row in enumerate(rows):
        indices = order[4 * step : 4 * step + 4]
        assert row["num_tokens"] == sum(len(lab.samples[index]["input_ids"]) for index in indices)
        trained = sum(int(lab.samples[index]["loss_mask"][1:].sum()) for index in indices)
        assert row["num_trained_tokens"] == trained
        assert row["step_seconds"] > 0


def test_the_first_and_the_last_rows_are_kept(lab):
    trainer = lab.trainer("run")
    trainer.state.log_history = [{"step": number} for number in range(5 * KEPT_ROWS)]
    trainer.log({"loss_of_nothing": 1.0})
    rows = trainer.state.log_history
    assert len(rows) == KEPT_ROWS + 1
    assert rows[0]["step"] == 0
    assert rows[-1]["loss_of_nothing"] == 1.0


def test_a_save_that_cannot_fit_is_not_begun(lab, monkeypatch):
    """The room that the last checkpoint took is what the next one is expected to take."""
    usage = SimpleNamespace(free=1000)
    trainer = lab.trainer("run", save_steps=2, max_steps=6)
    plain = trainer.checkpoints.committed

    def then_the_disk_is_full(path):
        plain(path)
        monkeypatch.setattr(shutil, "disk_usage", lambda place: usage)

    trainer.checkpoints.committed = then_the_disk_is_full
    with pytest.raises(CheckpointError, match=r"checkpoint-4 could not be written.* are needed"):
        trainer.train()
    verify_directory(lab.root / "run" / "checkpoint-2")
    assert not list((lab.root / "run").glob(".*"))
