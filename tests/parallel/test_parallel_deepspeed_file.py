"""A DeepSpeed file is held against the installed version and the recipe before anything starts."""

import json

import pytest
from commands import trainkit

from trainkit.errors import RecipeError
from trainkit.parallel import STRATEGIES
from trainkit.parallel.process import ProcessRank
from trainkit.parallel.zero.lint import lint_file, refuse_contradictions
from trainkit.recipe import Recipe
from trainkit.train.prepare import layout_of

ZERO = {"stage": 2}


def lint(**config):
    lint_file({"zero_optimization": ZERO, **config}, "ds.json")


@pytest.mark.parametrize("name", [name for name, row in STRATEGIES.items() if row.config])
def test_the_shipped_files_fit_the_installed_version(name):
    path = STRATEGIES[name].config
    lint_file(json.loads(path.read_text()), path)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"gradient_cliping": 1.0}, "gradient_cliping is no key.*did you mean gradient_clipping"),
        ({"zero_optimization": {"stage": 2, "overlap_com": True}}, "overlap_com"),
        ({"zero_optimization": {"stage": 2, "overlap_comm": "maybe"}}, "overlap_comm.*boolean"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "disk"}}}, "device"),
        ({"bf16": {"enabled": "perhaps"}}, "enabled.*boolean"),
        ({"gradient_clipping": "1.0"}, "gradient_clipping: '1.0' must be a number"),
        ({"steps_per_print": "ten"}, "steps_per_print: 'ten' must be a number"),
        ({"train_batch_size": [8]}, r"train_batch_size: \[8\] must be a number"),
        ({"wall_clock_breakdown": 1}, "wall_clock_breakdown: 1 must be true or false"),
        ({"activation_checkpointing": {"partition": 1}}, "activation_checkpointing.partition"),
        ({"data_types": {"grad_accum_dtype": "fp64"}}, "'fp64' must be one of fp32, bf16, fp16"),
        ({"optimizer": {"type": "AdamW"}}, "optimizer does nothing here: training.optim"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler does nothing here: training.lr_sch"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "simultaneously"),
        ({"wandb": {"enabled": True}}, "training.report_to decides"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "master_weights"),
        ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, "master_weights"),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "training.bf16"),
        ({"data_types": {"param_dtype": "fp32"}}, "param_dtype asks.*model.dtype decides"),
        ({"tensor_parallel": {"autotp_size": 2}}, "parallel.tensor decides"),
        ({"compile": {"deepcompile": True}}, "torch_compile decides"),
        ({"hybrid_engine": {"enabled": True}}, "hybrid_engine"),
        ({"pipeline": {"stages": 2}}, "parallel.pipeline decides"),
        ({"expert_parallel": {"autoep_size": 2}}, "experts"),
        ({"data_efficiency": {"enabled": True}}, "data and its order"),
        ({"weight_quantization": {"quantized_initialization": {"num_bits": 8}}}, "quantize"),
        ({"activation_checkpointing": {"partition_activations": True}}, "recompute"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"nvme_path": "/x"}}},
            "nvme_path asks",
        ),
    ],
)
def test_what_deepspeed_would_pass_over_or_fail_on_is_named(config, said):
    with pytest.raises(RecipeError, match=said):
        lint(**config)


@pytest.mark.parametrize(
    "config",
    [
        {"gradient_clipping": "auto", "train_batch_size": "auto", "steps_per_print": 100},
        {"activation_checkpointing": {"partition_activations": False, "number_checkpoints": None}},
        {
            "tensor_parallel": {"autotp_size": 1},
            "torch_autocast": {"enabled": False, "dtype": "fp16"},
        },
        {"flops_profiler": {"enabled": True}, "comms_logger": {"enabled": False}},
        {"communication_data_type": "fp32", "prescale_gradients": True},
        {"aio": {"block_size": 1048576}, "zero_allow_untested_optimizer": True},
    ],
)
def test_what_it_knows_passes(config):
    lint(**config)


RECIPE = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 1.0,
    "bf16": True,
    "fp16": False,
}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"train_micro_batch_size_per_gpu": 8}, "is 8, and training.per_device_train_batch_size 4"),
        ({"gradient_accumulation_steps": 1}, "is 1, and training.gradient_accumulation_steps 2"),
        ({"gradient_clipping": 0.5}, "is 0.5, and training.max_grad_norm 1.0"),
        ({"train_batch_size": 8}, "is 8, and the recipe's rows of a step 16"),
        ({"bf16": {"enabled": False}}, "bf16.enabled is False, and training.bf16, .* True"),
        ({"fp16": {"enabled": True}}, "fp16.enabled is True, and training.fp16, .* False"),
    ],
)
def test_what_the_recipe_says_otherwise_is_refused(config, said):
    with pytest.raises(RecipeError, match=said):
        refuse_contradictions(config, "ds.json", RECIPE, world_size=2)
    refuse_contradictions(dict.fromkeys(config, "auto"), "ds.json", RECIPE, world_size=2)
    refuse_contradictions({"train_batch_size": 16}, "ds.json", RECIPE, world_size=2)


@pytest.mark.parametrize(
    ("recipe", "config", "said"),
    [
        ({}, {"fp16": {"enabled": True}}, "fp16.enabled is True"),
        ({"training": {"bf16": False}}, {"bf16": {"enabled": True}}, "bf16.enabled is True"),
        ({"model": {"name_or_path": "m", "dtype": "float32"}}, {"bf16": {"enabled": True}}, "bf16"),
        ({"model": {"name_or_path": "m", "dtype": "auto"}}, {"bf16": {"enabled": True}}, None),
        ({}, {"bf16": {"enabled": True}, "fp16": {"enabled": "auto"}}, None),
        ({}, {}, None),
    ],
)
def test_precision_is_the_recipes(recipe, config, said, tmp_path):
    """Found when the model was loaded; what a file leaves out is the recipe's, too."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": ZERO, **config}))
    values = {"model": {"name_or_path": "m"}, "data": {"train": ["a"]}}
    values["parallel"] = {"shard": str(path)}
    chosen = Recipe(**{**values, **recipe})
    if said is None:
        layout = layout_of(chosen, ProcessRank(0, 0, 1))
        assert layout.engine.config["train_micro_batch_size_per_gpu"] == "auto"
        assert layout.engine.config["fp16"]["enabled"] == "auto"
    else:
        with pytest.raises(RecipeError, match=said):
            layout_of(chosen, ProcessRank(0, 0, 1))


def test_it_is_said_before_data_and_model_are_read(tmp_path):
    """The model is not even there."""
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}, "gradient_cliping": 1}')
    (tmp_path / "d.jsonl").write_text("no rows")
    (tmp_path / "r.yaml").write_text("model: {name_or_path: m}\ndata: {train: [d.jsonl]}\n")
    said = trainkit(tmp_path, "sft", "--config", "r.yaml", "--deepspeed", "ds.json")
    assert said.code == 2
    assert "did you mean gradient_clipping?" in said.err
