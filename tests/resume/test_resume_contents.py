"""A checkpoint whose manifest is right and whose content is not: named, and never a traceback."""

import json
import shutil

import pytest
import torch
from project import RECIPE
from safetensors.torch import load_file, save_file

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
    text = RECIPE if request.param == "lora" else RECIPE.replace(LORA, "")
    (project.root / "r.yaml").write_text(
        text.replace("save_steps: 2", "save_steps: 1, logging_steps: 4")
    )
    said = project.sft("--config", "r.yaml", "--output-dir", "run", "training.max_steps=2")
    assert said.code == 0, said.err
    return project


def damaged(project, damage):
    """The error of the run that goes on, when ``damage`` has been done and signed for."""
    checkpoint = project.root / "run" / "checkpoint-1"
    whole = project.root / "whole"
    if not whole.exists():
        shutil.copytree(checkpoint, whole)
    metadata = read_manifest(checkpoint).metadata
    damage(checkpoint)
    entries = tuple(hash_files(checkpoint, list_files(checkpoint)))
    (checkpoint / MANIFEST_NAME).write_bytes(Manifest(entries, metadata).to_bytes())
    said = project.sft("--resume", "run/checkpoint-1")
    shutil.rmtree(checkpoint)
    shutil.copytree(whole, checkpoint)
    assert said.code == 1, (said.out, said.err)
    assert "bug in trainkit" not in said.err
    assert "Traceback" not in said.err
    assert "checkpoint-1" in said.err
    return said.err


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
    for change in (cut, rounded, dict.pop):
        assert "q_proj" in damaged(begun, tensors(file, change)), change
    for key in ("exp_avg", "exp_avg_sq"):
        for change in (lambda t: t[:1].clone(), torch.Tensor.half, lambda _: torch.ones(1)):
            said = damaged(begun, pickled("optimizer.pt", first_state(key, change)))
            assert f": {key} is " in said
            assert "optimizer.pt" in said
    for change in (
        lambda held: dropped(held, "param_groups"),
        lambda held: dropped(held["param_groups"][0]["params"], 0),
        lambda _: [1],
    ):
        assert "optimizer.pt" in damaged(begun, pickled("optimizer.pt", change))


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


@pytest.mark.parametrize("begun", ["lora"], indirect=True)
def test_a_record_that_is_not_the_runs_is_named(begun):
    for values in STATES:
        said = damaged(begun, written("trainer_state.json", **values))
        assert "trainer_state.json" in said
        assert f"{next(iter(values))}: " in said
    for values in ({"loss": "high"}, {"logged_step": None}, {"meter": []}):
        window = "log_window_rank0.json"
        assert window in damaged(begun, written(window, **values))
    for key in ("python", "numpy", "cpu"):
        said = damaged(begun, pickled("rng_state.pth", lambda held, key=key: dropped(held, key)))
        assert "rng_state.pth" in said
    assert "scheduler.pt" in damaged(begun, pickled("scheduler.pt", lambda _: [1]))
