"""Every shipped recipe loads, says what each of its keys does, and the presets are sound."""

import json
import re
from pathlib import Path

import pytest

from trainkit.parallel import STRATEGIES
from trainkit.recipe import load_recipe, resolve_accumulation

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "configs").glob("*.yaml"))
NAMES = {
    "quickstart", "qwen2-0.5b-full", "qwen2-1.5b-full", "qwen2-7b-full", "llama3.1-8b-full-18gib",
    "llama3.2-1b-full", "qwen2-7b-lora", "qwen2-7b-qlora", "glm4-9b-lora", "smollm2-135m-lora-cpu",
}  # fmt: skip


def test_the_promised_recipes_are_there():
    assert {path.stem for path in RECIPES} >= NAMES


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_loads(path):
    loaded = load_recipe(path)
    assert loaded.name == path.stem
    for world_size in (1, 2, 4, 8):
        assert resolve_accumulation(loaded.recipe, world_size) >= 1


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_each_key_of_a_shipped_recipe_is_explained(path):
    for number, line in enumerate(path.read_text().splitlines(), 1):
        is_value = re.match(r" *[\w-]+: +[^#\s]", line)
        assert not is_value or "  # " in line, f"{path.name}:{number} has no comment: {line}"


def test_the_linked_presets_are_the_packages_own():
    linked = sorted((ROOT / "configs" / "deepspeed").glob("*.json"))
    assert [path.resolve() for path in linked] == sorted(
        row.config.resolve() for row in STRATEGIES.values() if row.config
    )


@pytest.mark.parametrize("name", [row.name for row in STRATEGIES.values() if row.config])
def test_a_preset_leaves_the_numbers_to_the_recipe(name):
    content = json.loads(STRATEGIES[name].config.read_text())
    for key in (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",  # DeepSpeed clips at 1.0 where nothing is said
    ):
        assert content[key] == "auto"
    assert "optimizer" not in content, "DeepSpeed's own would be compiled at the first start"
    stage = content["zero_optimization"]["stage"]
    assert str(stage) in name
    if stage == 3:
        assert content["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True
