"""The JSON schema: what the loader takes is valid for editors too, and the usual slips are not."""

import json
from importlib.metadata import version

import pytest

jsonschema = pytest.importorskip("jsonschema")

from trainkit.recipe import key_references, recipe_json_schema  # noqa: E402
from trainkit.recipe.document import read_document  # noqa: E402
from trainkit.recipe.write import schema_uri, shipped_recipes, shipped_text, write_text  # noqa: E402

SCHEMA = recipe_json_schema()
MINIMAL = {"model": {"name_or_path": "m"}, "data": {"train": ["a.jsonl"]}}


def problems(recipe):
    found = jsonschema.Draft202012Validator(SCHEMA).iter_errors(recipe)
    return [".".join(map(str, error.absolute_path)) or error.message for error in found]


def test_it_is_a_schema():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_are_valid_and_name_it(name):
    path = shipped_recipes()[name]
    assert problems(dict(read_document(path).values)) == []
    assert "# yaml-language-server: $schema=recipe.schema.json" in path.read_text()
    assert (path.parent / "recipe.schema.json").is_file()


def test_the_file_beside_the_recipes_is_current():
    path = next(iter(shipped_recipes().values())).parent / "recipe.schema.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    if f"transformers {version('transformers')}" not in str(written["properties"]["training"]):
        pytest.skip("written with another transformers")
    assert written == SCHEMA, f"write it anew: trainkit config schema > {path}"


def test_every_key_of_the_reference_is_in_it():
    text = json.dumps(SCHEMA)
    for entry in key_references():
        assert f'"{entry.key.rpartition(".")[2]}"' in text, entry.key


@pytest.mark.parametrize(
    "recipe",
    [
        {**MINIMAL, "data": {"train": "a.jsonl"}},
        {**MINIMAL, "data": {"train": [{"path": "a", "weight": 0.5}, "b#20"], "max_dropped": "1%"}},
        {**MINIMAL, "deepspeed": "zero2", "kernels": {"rope": False}},
        {**MINIMAL, "training": {"max_steps": -1, "warmup_steps": 0.03, "report_to": ["wandb"]}},
        {**MINIMAL, "training": {"lr_scheduler_type": "cosine", "max_grad_norm": 0}},
        {"base": "other.yaml", "training": {"learning_rate": 1e-5}},
    ],
)
def test_what_the_loader_takes_is_valid(recipe):
    assert problems(recipe) == []


@pytest.mark.parametrize(
    ("recipe", "where"),
    [
        ({**MINIMAL, "trainig": {}}, "trainig"),
        ({**MINIMAL, "training": {"learning_rat": 1}}, "training"),
        ({**MINIMAL, "training": {"learning_rate": "fast"}}, "training.learning_rate"),
        ({**MINIMAL, "training": {"learning_rate": -1.0}}, "training.learning_rate"),
        ({**MINIMAL, "training": {"lr_scheduler_type": "cosin"}}, "training.lr_scheduler_type"),
        ({**MINIMAL, "lora": {"r": 0}}, "lora"),
        ({**MINIMAL, "data": {"train": "a", "format": "chatml"}}, "data.format"),
        ({**MINIMAL, "data": {"train": "a", "mask": "answers"}}, "data.mask"),
    ],
)
def test_usual_slips_are_not(recipe, where):
    assert any(where in each for each in problems(recipe))


def test_a_written_recipe_names_the_installed_schema(tmp_path):
    target = tmp_path / "mine.yaml"
    write_text(shipped_text("qwen2-7b-lora"), target)
    assert f"# yaml-language-server: $schema={schema_uri()}\n" in target.read_text()
