"""What is printed is what a run uses, for every field of TrainingArguments."""

import os

import pytest

from trainkit.models.attention import Attention
from trainkit.parallel.process import Machine, ProcessRank
from trainkit.recipe import dump_resolved, load_recipe
from trainkit.train.prepare import layout_of, trainer_arguments
from trainkit.train.resume.record import settled

EVAL = "data.eval=[e]"
THEIRS = "transformers default"
CASES = {
    "nothing": ([], {}),
    "full in bf16": (["model.dtype=bfloat16"], {}),
    "lora in bf16": (["lora.r=4"], {"bf16": (True, "from model.dtype")}),
    "lora in fp32": (["lora.r=4", "model.dtype=float32"], {"bf16": (False, THEIRS)}),
    "lora, told otherwise": (["lora.r=4", "training.bf16=false"], {"bf16": (False, "override")}),
    "evaluation data": ([EVAL], {"eval_strategy": ("epoch", "from data.eval")}),
    "evaluation every so often": (
        [EVAL, "training.eval_steps=5"],
        {"eval_strategy": ("steps", "from training.eval_steps"), "eval_steps": (5, "override")},
    ),
    "evaluation in steps": (
        [EVAL, "training.eval_strategy=steps"],
        {"eval_steps": (1, "from training.logging_steps")},
    ),
    "no evaluation": ([EVAL, "training.eval_strategy='no'"], {"eval_strategy": ("no", "override")}),
    "the best": (
        [EVAL, "training.load_best_model_at_end=true", "training.save_strategy=epoch"],
        {
            "metric_for_best_model": ("loss", "from training.load_best_model_at_end"),
            "greater_is_better": (False, "from training.load_best_model_at_end"),
        },
    ),
    "the best, told nothing": (
        [EVAL, "training.load_best_model_at_end=true"],
        {"save_strategy": ("epoch", "from training.load_best_model_at_end")},
    ),
    "the best of steps": (
        [EVAL, "training.load_best_model_at_end=true", "training.eval_steps=5"],
        {"save_steps": (5, "from training.load_best_model_at_end")},
    ),
    "plateau": (
        [EVAL, "training.lr_scheduler_type=reduce_lr_on_plateau"],
        {"metric_for_best_model": ("loss", "from training.lr_scheduler_type")},
    ),
    "checkpointing": (
        ["training.gradient_checkpointing=true"],
        {
            "gradient_checkpointing_kwargs": (
                {"use_reentrant": False},
                "from training.gradient_checkpointing",
            )
        },
    ),
    "global batch": (
        ["global_batch_size=12", "training.per_device_train_batch_size=3"],
        {"gradient_accumulation_steps": (4, "from global_batch_size on 1 process")},
    ),
    "streaming": (
        ["data.streaming=true", "training.max_steps=5"],
        {"ignore_data_skip": (True, "from data.streaming")},
    ),
    "compiled": (
        ["training.torch_compile_mode=default"],
        {"torch_compile": (True, "from training.torch_compile_mode")},
    ),
}


@pytest.fixture
def load(tmp_path):
    def load(overrides):
        path = tmp_path / "r.yaml"
        path.write_text("model: {name_or_path: m}\ndata: {train: [d]}\n")
        return load_recipe(path, overrides)

    return load


@pytest.mark.parametrize("case", CASES)
def test_what_is_printed_is_what_the_trainer_gets(load, case):
    """All fields are compared; a value that only the built run knows would be in ``settled``."""
    overrides, expected = CASES[case]
    loaded = load(overrides)
    machine = Machine(world_size=1, on_cpu=True)
    args = trainer_arguments(loaded.recipe, layout_of(loaded.recipe, ProcessRank(0, 0, 1)))
    only_then = settled(loaded, machine, args, Attention("sdpa", "why", "blocks"))
    assert set(only_then) == {"model.attn_implementation"}
    shown = {row.key: (row.value, row.origin) for row in loaded.values(machine)}
    for name, value in expected.items():
        assert shown[f"training.{name}"] == value
    assert shown["training.use_cpu"] == (True, "this machine has no GPU")


def test_full_training_in_float16_has_a_loss_scaler_and_in_bfloat16_no_autocast(load):
    """On a GPU: without one there is no loss scaler, and the run is refused."""
    for dtype, name, expected in (("float16", "fp16", True), ("bfloat16", "bf16", False)):
        rows = load([f"model.dtype={dtype}"]).values(Machine(world_size=1, on_cpu=False))
        shown = {row.key: (row.value, row.origin) for row in rows}
        assert shown[f"training.{name}"] == (expected, "from model.dtype" if expected else THEIRS)


def test_what_only_the_built_run_knows_is_printed_too(load):
    loaded = load([])
    args = trainer_arguments(loaded.recipe, layout_of(loaded.recipe, ProcessRank(0, 0, 1)))
    args.ddp_find_unused_parameters = True
    args.warmup_steps = 7
    attention = Attention("sdpa", "why", "blocks")
    found = settled(loaded, Machine(on_cpu=True), args, attention)
    assert {name: (one.value, one.origin) for name, one in found.items()} == {
        "training.ddp_find_unused_parameters": (True, "from the model"),
        "training.warmup_steps": (7, "by transformers"),
        "model.attn_implementation": ("sdpa", "from auto: why"),
    }


def test_what_the_machine_decides_of_the_data_is_printed_and_not_kept(load, monkeypatch):
    """As comments: a copy of the recipe on another machine decides for itself."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    text = dump_resolved(load([]), Machine(on_cpu=True))
    assert f"  # num_workers: {os.cpu_count()}  # this machine's cores" in text
    assert "  # cache_dir: /c/trainkit/data  # this user's cache" in text
    chosen = dump_resolved(load(["data.num_workers=3", "data.cache_dir=d"]), Machine())
    assert "  num_workers: 3  # override" in chosen
    assert "  cache_dir: d  # override" in chosen
