"""A checkpoint whose manifest is right and whose content is not: named, and never a traceback."""

import json
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from commands import trainkit_each
from project import RECIPE
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from trainkit.checkpoint.whole.manifest import (
    MANIFEST_NAME,
    Manifest,
    hash_files,
    list_files,
    read_manifest,
)

LORA = "lora: {r: 4, alpha: 8}\n"


@pytest.fixture
def begun(project, request):
    """A run of two steps, saved in the middle of what is logged."""
    adapters, _, shard = request.param.partition(" ")
    text = RECIPE.replace("float32", "bfloat16").replace("" if adapters == "lora" else LORA, "")
    (project.root / "r.yaml").write_text(
        text.replace("save_steps: 2", "save_steps: 1, logging_steps: 4")
    )
    given = ["training.max_steps=2", *([f"parallel.shard={shard}"] if shard else [])]
    project.sft("--config", "r.yaml", "--output-dir", "run", *given).well()
    return project


def damaged(project, *damages):
    """The errors of the runs that go on, when each damage has been done and signed for."""
    commands = []
    for number, damage in enumerate(damages):
        run = shutil.copytree(project.root / "run", project.root / f"run{number}")
        checkpoint = run / "checkpoint-1"
        metadata = read_manifest(checkpoint).metadata
        damage(checkpoint)
        entries = tuple(hash_files(checkpoint, list_files(checkpoint)))
        (checkpoint / MANIFEST_NAME).write_bytes(Manifest(entries, metadata).to_bytes())
        commands.append(["sft", "--resume", f"run{number}/checkpoint-1"])
    errors = []
    for said in trainkit_each(project.root, commands):
        assert said.code == 1, (said.out, said.err)
        assert "bug in trainkit" not in said.err
        assert "Traceback" not in said.err
        assert "checkpoint-1" in said.err
        errors.append(said.err)
        shutil.rmtree(project.root / f"run{len(errors) - 1}")
    return errors


def tensors(file, change):
    def damage(checkpoint):
        held = load_file(checkpoint / file)
        change(held, next(name for name in held if "q_proj" in name))
        save_file(held, checkpoint / file, {"format": "pt"})

    return damage


def pickled(file, change):
    def damage(checkpoint):
        held = torch.load(checkpoint / file, weights_only=False)
        torch.save(change(held) or held, checkpoint / file)

    return damage


def written(file, **values):
    def damage(checkpoint):
        held = json.loads((checkpoint / file).read_text())
        (checkpoint / file).write_text(json.dumps({**held, **values}))

    return damage


def cut(held, name):
    held[name] = held[name][:1].clone()


def rounded(held, name):
    held[name] = held[name].to(torch.float16)


def dropped(held, key):
    del held[key]


def first_state(key, change):
    def of(held):
        entry = held["state"][0]
        entry[key] = change(entry[key])

    return of


WEIGHTS = {"lora": "adapter_model.safetensors", "full": "model.safetensors"}


@pytest.mark.parametrize("begun", ["lora", "full"], indirect=True)
def test_weights_and_states_that_are_not_the_runs_are_named(begun, request):
    file = WEIGHTS[request.node.callspec.params["begun"]]
    for said in damaged(begun, *(tensors(file, change) for change in (cut, rounded, dict.pop))):
        assert "q_proj" in said
    changes = (lambda t: t[:1].clone(), torch.Tensor.half, lambda _: torch.ones(1))
    key = "exp_avg_sq" if file == WEIGHTS["full"] else "exp_avg"
    states = (first_state(key, change) for change in changes)
    for said in damaged(begun, *(pickled("optimizer.pt", change) for change in states)):
        assert f": {key} is " in said
        assert "optimizer.pt" in said
    if file == WEIGHTS["lora"]:
        return
    shapes = (
        lambda held: dropped(held, "param_groups"),
        lambda held: dropped(held["param_groups"][0]["params"], 0),
        lambda _: [1],
    )
    for said in damaged(begun, *(pickled("optimizer.pt", change) for change in shapes)):
        assert "optimizer.pt" in said


STATES = [
    {"global_step": -5},
    {"global_step": 2},
    {"global_step": True},
    {"max_steps": None},
    {"epoch": float("nan")},
    {"epoch": "one"},
    {"log_history": {}},
    {"log_history": [3]},
    {"log_history": [{"step": "two", "loss": 1.0}]},
    {"log_history": [{"step": 2, "eval_loss": [1]}]},
    {"best_metric": "good"},
    {"best_global_step": 1.5},
    {"best_global_step": -2},
    {"best_model_checkpoint": 7},
    {"num_input_tokens_seen": "many"},
    {"total_flos": float("inf")},
    {"stateful_callbacks": []},
    {"stateful_callbacks": {"early_stopping": {"best": "x", "num_worse": 0}}},
    {"stateful_callbacks": {"early_stopping": {"best": 1.0}}},
    {"no_such_field": 1},
]


@pytest.mark.sample("*-0")
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("begun", ["lora"], indirect=True)
def test_a_record_that_is_not_the_runs_is_named(begun, part):
    values_of = STATES[part::4]
    states = (written("trainer_state.json", **values) for values in values_of)
    for values, said in zip(values_of, damaged(begun, *states), strict=True):
        assert "trainer_state.json" in said
        assert f"{next(iter(values))}: " in said
    window = "log_window_rank0.json"
    windows = ({"loss": "high"}, {"logged_step": None}, {"meter": []})
    for said in damaged(begun, *(written(window, **values) for values in windows)):
        assert window in said
    keys = ("python", "numpy", "cpu")
    drops = (pickled("rng_state.pth", lambda held, key=key: dropped(held, key)) for key in keys)
    for said in damaged(begun, *drops):
        assert "rng_state.pth" in said
    assert "scheduler.pt" in damaged(begun, pickled("scheduler.pt", lambda _: [1]))[0]


def without(*keys):
    """Take an entry out."""

    def change(held):
        for key in keys[:-1]:
            held = held[key]
        del held[keys[-1]]

    return change


def put(value, *keys):
    """Put ``value`` where an entry is, or what it makes of the entry."""

    def change(held):
        for key in keys[:-1]:
            held = held[key]
        held[keys[-1]] = value(held[keys[-1]]) if callable(value) else value

    return change


def one(tensor):
    return tensor.flatten()[:1].clone()


def are_named(begun, file, damages, damage, part):
    """Each of a quarter of them by what of the run it is not, and by its file."""
    damages = dict(list(damages.items())[part::4])
    errors = damaged(begun, *map(damage, damages.values()))
    for named, said in zip(damages, errors, strict=True):
        assert named.strip() in said, named
        assert file in said
        assert "in the run" in said, named


@pytest.mark.sample("*-0")
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("begun", ["full"], indirect=True)
def test_masters_counts_and_options_that_are_not_the_runs_are_named(begun, part):
    """Each was taken up without a word: cast, broadcast, or begun at nothing."""
    group = ("param_groups", 0)
    damages = {
        "masters": without("masters"),
        "masters.0": put(one, "masters", 0),
        "masters.1": put(torch.Tensor.half, "masters", 1),
        "step": put(torch.tensor(float("nan")), "state", 0, "step"),
        " step": put(torch.tensor(7.0), "state", 0, "step"),
        "state": without("state", 3),
        "exp_avg_sq": without("state", 1, "exp_avg_sq"),
        "state.99": put(lambda state: {**state, 99: state[0]}, "state"),
        "maximize": put(True, *group, "maximize"),
        "param_groups": put(lambda groups: groups[:1], "param_groups"),
        "masters ": put(lambda masters: masters[:-1], "masters"),
    }
    are_named(begun, "optimizer.pt", damages, lambda change: pickled("optimizer.pt", change), part)
    for file in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (said,) = damaged(begun, lambda checkpoint, file=file: (checkpoint / file).unlink())
        assert f"{file} is missing" in said
    changes = (put(1000, "last_epoch"), put(float("nan"), "base_lrs", 0), without("base_lrs"))
    for said in damaged(begun, *(pickled("scheduler.pt", change) for change in changes)):
        assert "scheduler.pt" in said


SHARDS = {
    "zero1": ("single_partition_of_fp32_groups", "base_optimizer_state"),
    "zero3": ("fp32_flat_groups", "optimizer_state_dict"),
}


@pytest.mark.sample("*1-0", "*3-3")
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("begun", ["full zero1", "full zero3"], indirect=True)
def test_shards_that_are_not_the_runs_are_named(begun, part, request):
    """DeepSpeed copies what it finds: one value into all, halves into singles."""
    masters, states = SHARDS[request.node.callspec.params["begun"].partition(" ")[2]]
    shard = "global_step1/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    if not (begun.root / "run/checkpoint-1" / shard).exists():
        shard = "global_step1/zero_pp_rank_0_mp_rank_00_optim_states.pt"
    place = "optimizer_state_dict"
    damages = {
        masters: put(one, place, masters, 0),
        f"{masters}.0": put(torch.Tensor.half, place, masters, 0),
        f"{masters} ": put(lambda groups: groups[:-1], place, masters),
        "exp_avg": put(one, place, states, "state", 0, "exp_avg"),
        "step": put(float("inf"), place, states, "state", 0, "step"),
        "the state": without(place, states, "state", 0),
        "exp_avg_sq": without(place, states, "state", 0, "exp_avg_sq"),
        "maximize": put(True, place, states, "param_groups", 0, "maximize"),
    }
    are_named(begun, "optim_states.pt", damages, lambda change: pickled(shard, change), part)


@pytest.mark.sample("*-0")
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("begun", ["full fsdp2"], indirect=True)
def test_parts_that_are_not_the_runs_are_named(begun, part):
    """Of torch's own format; pipelines have the same."""

    def parts(change):
        def damage(checkpoint):
            folder, plain = checkpoint / "sharded_state", checkpoint / "plain"
            dcp_to_torch_save(folder, plain)
            held = torch.load(plain, weights_only=False)
            plain.unlink()
            name = next(name for name in held["optimizer"]["state"] if "q_proj" in name)
            change(held["optimizer"], name)
            shutil.rmtree(folder)
            dcp.save(held, checkpoint_id=folder, no_dist=True)

        return damage

    damages = {
        "exp_avg": lambda held, name: put(one, "state", name, "exp_avg")(held),
        "exp_avg_sq": lambda held, name: put(torch.Tensor.half, "state", name, "exp_avg_sq")(held),
        "step": lambda held, name: put(torch.tensor(float("nan")), "state", name, "step")(held),
        "the state": lambda held, name: without("state", name)(held),
        " exp_avg": lambda held, name: without("state", name, "exp_avg")(held),
        "maximize": lambda held, name: put(True, "groups", 0, "maximize")(held),
    }
    are_named(begun, "sharded_state", damages, parts, part)
