"""The schema agrees with itself and with what it mirrors."""

import ast
from pathlib import Path

import pytest

import trainkit
from trainkit.errors import RecipeError
from trainkit.recipe import Recipe, key_references
from trainkit.recipe.keys import sections


def test_every_key_is_described():
    for entry in key_references():
        if not entry.key.startswith("training."):
            assert entry.help, entry.key
            assert entry.help.endswith("."), entry.key


def test_sections_stay_small():
    for section, names in sections().items():
        assert section == "training" or len(names) <= 23, section


TAKE_SECTIONS = (
    "options/model.py", "data", "evals", "lora", "models", "objectives", "parallel", "train",
    "recipe/derived.py",
)  # fmt: skip
"""The packages that the sections of a recipe are handed to, and the module that reads another."""


def test_each_key_is_read_by_what_takes_its_section():
    # A key that nothing reads would be accepted and do nothing.
    read = {"base"}
    package = Path(trainkit.__file__).parent
    for path in (package / part for part in TAKE_SECTIONS):
        for module in [path] if path.is_file() else path.rglob("*.py"):
            tree = ast.parse(module.read_text())
            read |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    # These two are handed to peft as all keys are that its LoraConfig has.
    read |= {"alpha", "use_rslora"}
    read |= {"precompute_reference"}  # through `Recipe.asks_reference`
    keys = [entry.key for entry in key_references() if not entry.key.startswith("training.")]
    assert not [key for key in keys if key.rpartition(".")[2] not in read]


def test_a_recipe_made_in_python_is_held_to_the_same_rules():
    values = {"model": {"name_or_path": "m"}, "data": {"train": ["a"]}}
    assert Recipe.model_validate(values).training["logging_steps"] == 1
    with pytest.raises(RecipeError, match=r"no training\.lerning_rate"):
        Recipe(**values, training={"lerning_rate": 1})
    with pytest.raises(RecipeError, match="'fast' must be a number"):
        Recipe(**values, training={"learning_rate": "fast"})
