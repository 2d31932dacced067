"""What the estimate repeats of other rooms, held against them; and whole numbers of real models."""

import json
import subprocess
import sys
import weakref
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trainkit.auto_class import auto_class
from trainkit.estimate import peak as counts
from trainkit.estimate.gpus import GPUS, gpu_named
from trainkit.estimate.job import Adapters
from trainkit.estimate.peak import OWNERS, peak
from trainkit.estimate.plan import MIN_OFFLOAD_WIDTH, Plan
from trainkit.estimate.recipe import plan_of
from trainkit.estimate.record import Tracker
from trainkit.estimate.shape import NAMED, find_shape, from_config, plain_name
from trainkit.models import recompute
from trainkit.models.frozen import outside_text
from trainkit.options import LoraOptions
from trainkit.options.optimizers import OPTIMIZERS, SERVED
from trainkit.recipe import Recipe, load_recipe
from trainkit.recipe.write import shipped_recipes
from trainkit.train import masters as rounding


def test_what_was_there_before_a_step_gives_its_address_to_nobody() -> None:
    """bitsandbytes replaces a bias in the first forward pass; what came there was not counted."""
    bias = torch.zeros(3)
    storage = weakref.ref(bias.untyped_storage())
    tracker = Tracker([bias], [])
    bias.data = bias.data.bfloat16()
    assert storage() is not None
    del tracker
    assert storage() is None


@pytest.mark.parametrize("name", SERVED)
def test_the_states_are_what_the_table_says(name: str) -> None:
    """Every row by itself: nothing is taken for AdamW."""
    row, shape = OPTIMIZERS[name], find_shape("llama-3.1-8b")
    found = counts.optimizer_bytes(row, shape, full=True) * shape.parameters
    least = row.matrix_bytes if row.per_rank_bytes is None else 0.0
    tables = (row.embedding_bytes + row.head_bytes) * shape.table
    matrices = shape.matrix_numbers
    assert least * matrices + tables <= found
    assert found <= 1.001 * (max(row.matrix_bytes, 0.01) * matrices + tables) + 8e6
    if row.per_rank_bytes is not None:
        assert found < 0.2 * 8 * matrices + tables
        thin = counts.optimizer_bytes(row, shape, full=True, rank=8) * shape.parameters
        assert thin < found
    assert counts.optimizer_bytes(row, shape, full=False) == row.matrix_bytes


_TORCH = {"sgd": torch.optim.SGD, "rmsprop": torch.optim.RMSprop, "adagrad": torch.optim.Adagrad}


@pytest.mark.parametrize("name", _TORCH)
def test_arguments_that_keep_more_are_counted(name: str) -> None:
    """``momentum`` and the like: 4 bytes a weight, which are 30 GiB of an 8B."""
    row, shape = OPTIMIZERS[name], find_shape("llama-3.1-8b")
    weight = torch.nn.Parameter(torch.randn(64, 64))
    for argument in (None, *row.arguments):
        text = None if argument is None else f"{argument.name}={_A_VALUE[argument.kind]}"
        if argument is not None and argument.name == "nesterov":
            text += ",momentum=0.9"
        optimizer = _TORCH[name]([weight], lr=1e-3, **row.read(text))
        weight.grad = torch.randn_like(weight)
        optimizer.step()
        kept = optimizer.state.get(weight, {})
        numbers = sum(
            each.numel() for each in kept.values() if torch.is_tensor(each) and each.dim()
        )
        for full in (True, False):
            found = counts.optimizer_bytes(row, shape, full=full, args=text)
            assert found == pytest.approx(4 * numbers / weight.numel(), abs=1e-3), text


_A_VALUE = {float: "0.5", bool: "true", int: "1"}


def test_pieces_are_the_optimizers() -> None:
    assert counts.PIECE == rounding.PIECE


def test_eight_billion_parameters_train_in_full_in_18_gib() -> None:
    recipe = load_recipe(shipped_recipes()["llama3.1-8b-full-18gib"], []).recipe
    found = peak(plan_of(recipe, 1))
    assert found.gib <= 18.0
    kept = replace(plan_of(recipe, 1), keeps_masters=True)
    assert peak(kept).gib >= found.gib + 4 * 8.03e9 / 2**30 - 1
    late = replace(plan_of(recipe, 1), in_backward=False)
    assert peak(late).gib >= found.gib + 4 * 8.03e9 / 2**30 - 4


def test_offload_width() -> None:
    assert recompute.MIN_WIDTH == MIN_OFFLOAD_WIDTH


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "llama-3-8b", "phi-4", "gemma-3-1b", "glm4-9b"])
def test_parameters_are_the_models(name: str) -> None:
    config = NAMED[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**{**config, "num_hidden_layers": 2})
        )
    real = sum(parameter.numel() for parameter in model.parameters())
    assert from_config({**config, "num_hidden_layers": 2}, name).parameters == real
    shape = find_shape(name)
    assert shape.layers == config["num_hidden_layers"]
    assert shape.parameters == real + (shape.layers - 2) * shape.kinds[0].numbers


def test_layers_of_several_kinds_are_told_apart() -> None:
    """Five that look near to one that looks far; and a dense one before those with experts."""
    gemma = find_shape("gemma-3-1b")
    assert [gemma.order.count(kind) for kind in range(len(gemma.kinds))] == [22, 4]
    moe = from_config({**_MOE, "mlp_only_layers": [0], "num_hidden_layers": 5}, "moe")
    assert moe.order == (0, 1, 1, 1, 1)
    stacks = [each for each in moe.kinds[1].matrices if each.in_stack]
    assert sum(each.numbers for each in stacks) == 3 * 16 * 64 * 32


_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 96, "head_dim": 16,
    "moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 2, "vocab_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
}  # fmt: skip


def test_experts_compute_for_the_tokens_they_get() -> None:
    """One of four: the products of experts are a quarter of what all of them would be."""
    found, few = {}, {**_MOE, "num_experts": 4}
    for active in (1, 2):
        shape = from_config({**few, "num_experts_per_tok": active}, "moe")
        found[active] = Plan(shape, 1, 256).recorded.kinds[-1].matrix[0]
    assert found[2] - found[1] == 256 * 2 * 3 * 64 * 32
    shape = from_config({**few, "hidden_size": 128, "moe_intermediate_size": 64}, "moe")
    dropped, fused = (
        Plan(shape, 1, 256, adapters=Adapters.of(LoraOptions(dropout=rate, experts=True)))
        for rate in (0.1, 0.0)  # a loop over experts, and the op
    )
    work = [plan.recorded.kinds[-1].matrix[0] for plan in (dropped, fused)]
    assert work[1] < work[0] < 1.5 * work[1]


@pytest.mark.sample("gemma3")
@pytest.mark.parametrize("kind", ["qwen2_vl", "gemma3"])
def test_towers_are_counted_as_weights(kind: str) -> None:
    config = AutoConfig.for_model(kind)
    sizes = {"num_hidden_layers": 1, "hidden_size": 1024, "intermediate_size": 64}
    config.text_config.update({**sizes, "num_attention_heads": 8, "num_key_value_heads": 2})
    config.vision_config.update({"depth": 2, "num_hidden_layers": 2})
    if getattr(config.text_config, "layer_types", None):
        config.text_config.layer_types = config.text_config.layer_types[:1]
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    shape = from_config(json.loads(config.to_json_string(use_diff=False)), "a")
    tower = sum(each.numel() for each in outside_text(model).values())
    assert shape.tower == tower > 0
    every = sum(each.numel() for each in model.parameters())
    assert shape.tower + shape.parameters == every
    assert counts.weights(Plan(shape, 1, 8)) == 2 * every


def test_what_a_model_asks_of_numbers_is_said() -> None:
    assert not Plan(find_shape("llama-3.2-1b"), 1, 64).recorded.assumed


@pytest.mark.parametrize(
    ("hub", "short"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("meta-llama/Llama-3.2-1B", "llama-3.2-1b"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("zai-org/GLM-4-9B-0414", "glm-4-9b-0414"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("Qwen/Qwen3-4B-Thinking-2507", "qwen3-4b"),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "tinyllama-1.1b"),
    ],
)
def test_hub_names_are_known(hub: str, short: str) -> None:
    assert plain_name(hub) == short
    assert short in NAMED


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 4090", "4090"),
    ],
)
def test_drivers_names(driver: str, name: str) -> None:
    found = gpu_named(driver)
    assert found is not None
    assert found.name == name
    assert gpu_named("Voodoo 2") is None


def test_torch_waits_until_something_is_estimated() -> None:
    code = (
        "import sys, trainkit.estimate.recipe, trainkit.estimate.estimate;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


_LLAMA = find_shape("llama-3.1-8b")


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({"recompute": 1}, {"recompute": 2}),
        ({"recompute": 2}, {}),
        ({"recompute": 1}, {"recompute": 1, "selective": True}),
        ({"recompute": 1, "selective": True}, {}),
        ({"recompute": 1, "offload": True}, {"recompute": 1}),
        ({"recompute": 1}, {"recompute_first": 31}),
        ({"recompute_first": 20}, {"recompute_first": 10}),
        ({"batch_size": 4}, {"batch_size": 16}),
        ({"gpus": 8, "stage": 1}, {"gpus": 8}),
        ({"gpus": 8, "stage": 2}, {"gpus": 8, "stage": 1}),
        ({"gpus": 8, "stage": 3}, {"gpus": 8, "stage": 2}),
        ({"stage": 3, "offloads_optimizer": True, "offloads_weights": True}, {"stage": 3}),
        ({"gpus": 8, "stage": 3, "fsdp": True}, {"gpus": 8, "stage": 2}),
        ({"gpus": 8, "stage": 3, "fsdp": True}, {"gpus": 4, "stage": 3, "fsdp": True}),
        ({"adapters": Adapters.of()}, {}),
        ({"adapters": Adapters.of(), "base": "fp8", "fp8": 1.0}, {"adapters": Adapters.of()}),
        (
            {"adapters": Adapters.of(), "base": "nf4"},
            {"adapters": Adapters.of(), "base": "fp8", "fp8": 1.0},
        ),
        (
            {"adapters": Adapters.of(offload=True), "recompute": 1},
            {"adapters": Adapters.of(), "recompute": 1},
        ),
        ({"adapters": Adapters.of()}, {"adapters": Adapters.of(LoraOptions(dropout=0.1))}),
        ({}, {"ops": frozenset()}),
        ({"optimizer": 2.03}, {}),
        ({"fp8": 0.5}, {"fp8": 1.0}),
    ],
    ids=str,
)
def test_what_saves_memory_saves_memory(less: dict, more: dict) -> None:  # type: ignore[type-arg]
    plan = {"shape": _LLAMA, "batch_size": 16, "length": 2048, "accumulation": 2}
    smaller, larger = peak(Plan(**{**plan, **less})), peak(Plan(**{**plan, **more}))
    assert smaller.gib < larger.gib
    assert list(smaller.by_owner) == list(OWNERS)
    assert min(smaller.by_owner.values()) >= 0


def test_gpus_are_in_order() -> None:
    for name, gpu in GPUS.items():
        assert name == gpu.name == name.lower()
        assert min(gpu.teraflops, gpu.bandwidth, gpu.memory_gib) > 10


@pytest.mark.parametrize("shard", ["none", "zero2", "zero3", "fsdp2"])
@pytest.mark.parametrize("lora", [None, {"r": 16}])
def test_two_ranks_that_share_a_row_need_what_each_would_for_half_of_it(shard, lora) -> None:
    def found(length, **parallel):
        recipe = Recipe(
            model={"name_or_path": "Qwen/Qwen2.5-7B"},
            data={"train": ["a.jsonl"], "max_length": length},
            lora=lora,
            parallel={"shard": shard, **parallel},
            global_batch_size=8,
            training={"per_device_train_batch_size": 1},
        )
        return plan_of(recipe, 2)

    shared, apart = found(8192, sequence=2), replace(found(4096), accumulation=8)
    assert peak(shared).by_owner == peak(apart).by_owner
    assert shared.tokens * shared.accumulation * shared.gpus == 8 * 8192
