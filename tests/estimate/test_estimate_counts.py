"""What the estimate repeats of other rooms, held against them; and whole numbers of real models."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from families.family_models import FAMILIES
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from trainkit.errors import ModelError
from trainkit.estimate import peak as counts
from trainkit.estimate.gpus import GPUS, gpu_named
from trainkit.estimate.peak import OWNERS, peak
from trainkit.estimate.plan import ALL_OPS, MIN_OFFLOAD_WIDTH, Adapters, Plan
from trainkit.estimate.recipe import plan_of
from trainkit.estimate.shape import NAMED, TRAITS, find_shape, from_config, plain_name
from trainkit.kernels.linear_cross_entropy import function as loss
from trainkit.kernels.linear_cross_entropy.products import _NUMBERS_THAT_FILL, default_chunk_tokens
from trainkit.models import recompute
from trainkit.options.model import LORA_OPS, OPS
from trainkit.options.optimizers import OPTIMIZERS, SERVED
from trainkit.recipe import Recipe, load_recipe
from trainkit.recipe.write import shipped_recipes
from trainkit.train import masters as rounding


def test_families_with_kernels_are_counted() -> None:
    assert {name for name, traits in TRAITS.items() if traits.kernels} == set(FAMILIES)


def test_ops_exist() -> None:
    assert {*OPS, *LORA_OPS} >= ALL_OPS


@pytest.mark.parametrize("tokens", [1, 255, 8192, 32768, 50001])
@pytest.mark.parametrize("vocab", [32000, 151936])
def test_chunks_are_the_kernels(tokens: int, vocab: int) -> None:
    limit = default_chunk_tokens(vocab, 2)
    assert counts.chunk_rows(tokens, vocab, 2) == loss.chunk_rows(tokens, limit)
    assert counts.NUMBERS_THAT_FILL == _NUMBERS_THAT_FILL


@pytest.mark.parametrize("name", SERVED)
def test_the_states_are_what_the_table_says(name: str) -> None:
    """Every row by itself: nothing is taken for AdamW."""
    row, shape = OPTIMIZERS[name], find_shape("llama-3.1-8b")
    found = counts.optimizer_bytes(row, shape, full=True) * shape.parameters
    least = row.matrix_bytes if row.per_rank_bytes is None else 0.0
    tables = (row.embedding_bytes + row.head_bytes) * shape.table
    matrices = shape.layers * shape.layer_matrices
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


@pytest.mark.parametrize("name", NAMED)
def test_parameters_are_the_models(name: str) -> None:
    values = {**NAMED[name], "num_hidden_layers": 2}
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config.pad_token_id = None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    real = sum(parameter.numel() for parameter in model.parameters())
    assert from_config(config.to_dict(), name).parameters == pytest.approx(real, rel=1e-4)
    two = replace(find_shape(name), layers=2)
    assert from_config(config.to_dict(), two.name) == two


@pytest.mark.parametrize("family", sorted(TRAITS.keys() - {"qwen2_vl"}))
def test_biases_are_the_models(family: str) -> None:
    """Switched on where the family has a switch; a class without one keeps to its own."""
    sizes = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
    }  # fmt: skip
    kind = f"{family}_text" if family == "gemma3" else family
    config = AutoConfig.for_model(kind, **sizes, attention_bias=True, mlp_bias=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    real = sum(parameter.numel() for parameter in model.parameters())
    assert from_config(config.to_dict(), family).parameters == real


def test_a_tower_for_sound_is_refused() -> None:
    for kind in ("qwen2_audio", "voxtral"):
        with pytest.raises(ModelError, match="with a tower for sound"):
            from_config(AutoConfig.for_model(kind).to_dict(), kind)


def test_a_tower_for_images_is_counted_or_refused() -> None:
    config = AutoConfig.for_model("qwen2_vl")
    config.text_config.num_hidden_layers = 1
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    shape = from_config(config.to_dict(), "a")
    tower = [each.numel() for name, each in model.named_parameters() if "visual" in name]
    assert shape.tower == sum(tower)
    assert counts.weights(Plan(shape, 1, 8)) == 2 * sum(each.numel() for each in model.parameters())
    with pytest.raises(ModelError, match="gemma3 with a tower for images"):
        from_config(AutoConfig.for_model("gemma3").to_dict(), "b")


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


def test_comes_without_torch() -> None:
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
        (
            {"stage": 3, "offloads_optimizer": True, "offloads_weights": True},
            {"stage": 3},
        ),
        ({"gpus": 8, "stage": 3, "fsdp": True}, {"gpus": 8, "stage": 2}),
        ({"gpus": 8, "stage": 3, "fsdp": True}, {"gpus": 4, "stage": 3, "fsdp": True}),
        ({"adapters": Adapters()}, {}),
        ({"adapters": Adapters(), "base": "fp8", "fp8": 1.0}, {"adapters": Adapters()}),
        (
            {"adapters": Adapters(), "base": "nf4"},
            {"adapters": Adapters(), "base": "fp8", "fp8": 1.0},
        ),
        (
            {"adapters": Adapters(offload=True), "recompute": 1},
            {"adapters": Adapters(), "recompute": 1},
        ),
        ({"adapters": Adapters()}, {"adapters": Adapters(dropout=0.1)}),
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
