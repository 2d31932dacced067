"""Sequences of commands: override, go back, kill, repeat."""

import json
import shutil

import pytest
from commands import trainkit_each
from ranks import run_ranks
from resume.record import digests, metrics, record

from trainkit.run.starts import runs_named

FIRST = ("--config", "r.yaml", "--output-dir")
START = (*FIRST, "run")


def stored(run):
    """Every file of a run with its bytes; without those that say which processes are at work."""
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    return {
        path: content
        for path, content in files.items()
        if path.name != ".lock" and not path.name.startswith(("rank0.json", "stacks-"))
    }


def test_overrides_act_from_the_checkpoint_on_and_are_recorded(project):
    project.sft(*START, "lora=null", kill_at=5)
    overrides = (
        "training.learning_rate=1e-3",
        "training.weight_decay=0.3",
        "training.save_steps=3",
        "training.adam_beta2=0.9",
    )
    assert project.sft("--resume", "run", *overrides, kill_at=7) is None
    assert project.sft("--resume", "run").code == 0  # they stay without being typed again
    rates = project.rates("run")
    assert rates[4] == pytest.approx(1e-2 * 5 / 8)
    assert [rates[step] for step in (5, 8)] == pytest.approx([1e-3 * 4 / 8, 1e-3 / 8])
    names = {path.name for path in (project.root / "run").glob("checkpoint-*")}
    assert names == {"checkpoint-2", "checkpoint-4", "checkpoint-6", "checkpoint-8"}
    import torch

    state = torch.load(project.root / "run/checkpoint-8/optimizer.pt", weights_only=True)
    decays, betas = zip(
        *((g["weight_decay"], g["betas"]) for g in state["param_groups"]), strict=True
    )
    assert decays == (0.3, 0.0)
    assert set(betas) == {(0.9, 0.9)}
    _, second, third = project.starts("run")
    assert second["step"] == 4
    assert {row["key"] for row in second["changes"]} == {key.split("=")[0] for key in overrides}
    assert third["changes"] == []
    resolved = (project.root / "run" / "resolved.yaml").read_text()
    assert "learning_rate: 0.001  # override at step 4" in resolved
    assert "weight_decay: 0.0 → 0.3" in (project.root / "run" / "report.html").read_text()


SHAPES = {
    "warm-up": (
        ["training.warmup_steps=1"],
        "training.warmup_steps=6",
        lambda step: 1e-2 * min(step / 6, (8 - step) / 2),
    ),
    "arguments": (
        ["training.lr_scheduler_type=polynomial"],
        "training.lr_scheduler_kwargs={power: 2.0, lr_end: 0.0}",
        lambda step: 1e-2 * (1 - step / 8) ** 2,
    ),
    "LoRA+": (
        ["lora.lora_plus_ratio=4"],
        "lora.lora_plus_ratio=2",
        lambda step: 1e-2 * (1 - step / 8),
    ),
}
"""What the run is given, what the continued run is, and the rate at a step from there on."""


@pytest.mark.parametrize("case", SHAPES)
def test_the_shape_of_a_schedule_acts_from_the_checkpoint_on(project, case):
    """The rate is the one that the schedule, as it is now, has at that step."""
    given, change, rate = SHAPES[case]
    project.sft(*START, *given, kill_at=5)
    result = project.sft("--resume", "run", change).well()
    rates = project.rates("run")
    # The rate that is logged with a step was set at the end of the step before.
    assert [rates[step] for step in (5, 8)] == pytest.approx([rate(4), rate(7)])
    assert f"from step 4 on, {change.split('=')[0]}" in result.err
    rate_now = f"the learning rate goes on at {rates[5]:.4g}; it was"
    if case == "LoRA+":
        rate_now = f"goes on at {2 * rates[5]:.4g} where learning_rate is 0.02; it was"
    assert rate_now in result.err
    import torch

    state = torch.load(project.root / "run/checkpoint-8/optimizer.pt", weights_only=True)
    bases = sorted({group["initial_lr"] for group in state["param_groups"]})
    assert bases == ([1e-2, 2e-2] if case == "LoRA+" else [1e-2])


def test_a_schedule_with_a_state_of_its_own_goes_on_over_the_new_rates(project):
    plateau = ("training.lr_scheduler_type=reduce_lr_on_plateau", "lora.lora_plus_ratio=4")
    project.sft(*START, *plateau, "training.eval_strategy=epoch", kill_at=5)
    changes = ("training.learning_rate=1e-3", "lora.lora_plus_ratio=2")
    assert project.sft("--resume", "run", *changes).code == 0
    import torch

    state = torch.load(project.root / "run/checkpoint-8/optimizer.pt", weights_only=True)
    assert {group["lr"] for group in state["param_groups"]} == {1e-3, 2e-3}


@pytest.mark.sample("zero3")
@pytest.mark.parametrize("shard", ["zero1", "zero2", "zero3"])
def test_a_new_rate_and_decay_reach_the_sharded_optimizer(project, shard):
    project.sft(*START, "lora=null", f"deepspeed={shard}", num_ranks=2, kill_at=5)
    overrides = ("training.learning_rate=1e-3", "training.weight_decay=0.3")
    assert project.sft("--resume", "run", *overrides, num_ranks=2).code == 0
    assert project.rates("run")[5] == pytest.approx(1e-3 * 4 / 8)
    import torch

    (path,) = (project.root / "run/checkpoint-8").rglob("*rank_0_mp_rank_00_optim_states.pt")
    state = torch.load(path, weights_only=False)["optimizer_state_dict"]
    groups = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    groups = groups["param_groups"] if isinstance(groups, dict) else groups
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]


REFUSED = [
    ("training.optim=sgd", 'training.optim: "adamw_torch_fused" -> "sgd"'),
    ("model.dtype=bfloat16", 'model.dtype: "float32" -> "bfloat16"'),
    ("training.lr_scheduler_type=constant", "training.lr_scheduler_type"),
    ("training.lr_scheduler_type=cosine", "another schedule"),
    ("lora.r=8", "lora.r: 4 -> 8"),
    ("lora.lora_plus_ratio=8", "lora.lora_plus_ratio: null -> 8"),
    ("deepspeed=zero2", "trainkit merge"),
    ("training.seed=9", "--allow-changed training.seed"),
    ("data.mask=none", "--allow-changed data"),
    ("training.max_steps=3", "is at step 4, and the recipe ends at step 3"),
    (
        "training.max_steps=-1 training.num_train_epochs=0.5",
        "at step 4, and the recipe ends at step 3",
    ),
]


def test_what_cannot_be_changed_is_refused_by_name_and_touches_nothing(project, broken):
    before = stored(broken)
    commands = [["sft", "--resume", "run", *change.split()] for change, _ in REFUSED]
    said = trainkit_each(project.root, commands)
    for (change, message), result in zip(REFUSED, said, strict=True):
        assert result.code == 1, change
        assert message in result.err, change
        assert "M parameters" not in result.err  # no model was built to find that out
    after = stored(broken)
    for path in (broken / "status.json", *broken.glob("kernels.json"), *broken.glob("logs/*")):
        before.pop(path, None), after.pop(path, None)
    assert after == before


def test_a_checkpoint_that_is_gone_is_refused_with_those_that_are_there(project, broken):
    said = project.sft("--resume", "run/checkpoint-3")
    assert "there is no such checkpoint" in said.err
    assert "the run has checkpoint-2, checkpoint-4" in said.err


def test_a_dry_run_refuses_what_the_continued_run_would_and_touches_nothing(project, broken):
    before = stored(broken)
    assert "lora.r: 4 -> 8" in project.sft("--resume", "run", "lora.r=8", "--dry-run").err
    rows = project.root / "d.jsonl"
    text = rows.read_text()
    rows.write_text("\n".join(text.split("\n")[:-1]))
    result = project.sft("--resume", "run", "--dry-run")
    assert result.code == 1
    assert "d.jsonl was changed (24 samples, now 23)" in result.err
    rows.write_text(text)
    assert stored(broken) == before
    with (broken / "checkpoint-4/adapter_model.safetensors").open("r+b") as file:
        file.truncate(100)
    damaged = project.sft("--resume", "run/checkpoint-4", "--dry-run")
    assert damaged.code == 1
    assert "adapter_model.safetensors" in damaged.err


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return tmp_path_factory.mktemp("made")


def copied(project, made, name, **options):
    """A run that is made once."""
    run = project.root / "run"
    if not (made / name).exists():
        project.sft(*START, **options)
        shutil.copytree(run, made / name)
    else:
        shutil.copytree(made / name, run)
    return run


@pytest.fixture
def broken(project, made):
    """Killed in step 5."""
    return copied(project, made, "broken", kill_at=5)


@pytest.fixture
def whole(project, made):
    return copied(project, made, "whole")


def test_going_back_retires_what_came_later(project, whole):
    run, before = whole, record(whole)
    assert project.sft("--resume", "run/checkpoint-4", kill_at=7) is None
    names = {path.name for path in run.iterdir() if "checkpoint" in path.name}
    assert names == {
        "checkpoint-2",
        "checkpoint-4",
        "checkpoint-6",
        "retired-checkpoint-6",
        "retired-checkpoint-8",
    }
    assert not (run / "final").exists(), "of the attempt that was given up"
    assert project.starts("run")[-1]["retired"] == [
        "retired-checkpoint-8",
        "retired-checkpoint-6",
        "retired-final",
    ]
    assert "continuing from " + str(run / "checkpoint-6") in project.sft("--resume", "run").err
    assert record(run) == before
    assert "renaming" in project.sft("--resume", "run/retired-checkpoint-8").err


def test_a_finished_run_is_left_alone(project, whole):
    run, before = whole, stored(whole)
    ways = (("--resume", "run"), (*START, "--resume"), ("--resume", "run/checkpoint-8"))
    again = ("--resume", "run", "training.learning_rate=1")
    *said, refused = trainkit_each(project.root, [["sft", *way] for way in (*ways, again)])
    for result in said:
        assert (result.code, result.out.strip()) == (0, str(run))
        assert "is done" in result.err
    assert (refused.code, "nothing is left" in refused.err) == (1, True)
    assert stored(run) == before
    assert project.sft("--resume", "run", "training.max_steps=10").code == 0
    assert [row["step"] for row in metrics(run) if "loss" in row] == list(range(1, 11))


def test_a_run_killed_before_its_first_checkpoint_starts_again_in_its_place(project, whole):
    """By its name, which looks like a checkpoint's, and by the same command."""
    for run, again in (("checkpoint-7", ()), ("run-1", (*FIRST, "run-1"))):
        project.sft(*FIRST, run, kill_at=2)
        result = project.sft(*again, "--resume", *([] if again else [run])).well()
        assert "stopped before its first checkpoint; it starts again" in result.err
        assert record(project.root / run) == record(whole)


def test_a_restart_by_torchrun_goes_on_with_its_own_run(project):
    """The same command once more, without --resume and without --output-dir."""
    launch = {"TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_RESTART_COUNT": "0"}
    command = ("--config", "r.yaml")
    project.sft(*command, "training.seed=3")  # an earlier run of this recipe, by nobody
    project.sft(*command, kill_at=1, environment=launch)
    launch["TORCHELASTIC_RESTART_COUNT"] = "1"
    project.sft(*command, kill_at=5, environment=launch)
    last = project.sft(*command, environment=launch).well()
    newest, other = runs_named(project.root / "train_model", "r")
    assert last.out.strip() == str(newest)
    assert len(project.starts(newest)) == 3
    assert len(project.starts(other)) == 1


def test_auto_takes_runs_of_this_recipe_only(project):
    (project.root / "r-lowlr.yaml").write_text((project.root / "r.yaml").read_text())
    project.sft("--config", "r.yaml", kill_at=5)
    project.sft("--config", "r-lowlr.yaml", kill_at=5)
    result = project.sft("--config", "r.yaml", "--resume", "auto")
    (run,) = runs_named(project.root / "train_model", "r")
    assert result.out.strip() == str(run)
    (other,) = runs_named(project.root / "train_model", "r-lowlr")
    assert json.loads((other / "status.json").read_text())["state"] == "running"


def test_fewer_processes_are_refused_with_the_difference(project):
    arguments = (*START, "global_batch_size=4", "training.per_device_train_batch_size=1")
    project.sft(*arguments, num_ranks=2, kill_at=5)
    again = {"cwd": str(project.root), "argv": ["sft", "--resume", "run", "training.seed=9"]}
    (code, _, table), other = run_ranks("commands:run_command", **again)
    assert (code, "training.seed" in table) == (1, True)
    assert (other[0], "training.seed" in other[2]) == (1, False), "it is the same on every rank"
    refused = project.sft("--resume", "run")
    assert refused.code == 1
    assert "num_ranks: 2 -> 1" in refused.err
    accepted = project.sft("--resume", "run", "--allow-changed", "num_ranks", kill_at=5)
    assert accepted is None
    assert project.starts("run")[-1]["accepted"] == [{"key": "num_ranks", "before": 2, "now": 1}]
    assert project.sft("--resume", "run").code == 0, "what was accepted once stays so"


def test_other_data_is_refused_and_accepted(project, broken):
    with (project.root / "d.jsonl").open("a") as stream:
        stream.write('\n{"messages": [{"role": "user", "content": "a"}, ')
        stream.write('{"role": "assistant", "content": "b"}]}')
    refused = project.sft("--resume", "run")
    assert (refused.code, "--allow-changed data" in refused.err) == (1, True)
    assert project.sft("--resume", "run", "--allow-changed", "data").code == 0
    assert digests(broken / "final")
