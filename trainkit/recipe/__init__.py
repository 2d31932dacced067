"""Recipes: the schema, the YAML loader and overrides. No torch here."""

from trainkit.recipe.check.files import check_files, read_chat_template
from trainkit.recipe.check.problems import InvalidRecipe, Problem
from trainkit.recipe.derived import (
    Derived,
    derive,
    derive_training,
    recompute_of,
    resolve_accumulation,
)
from trainkit.recipe.fields.find import FoundKeys, find_keys
from trainkit.recipe.load import LoadedRecipe, ResolvedValue, load_recipe
from trainkit.recipe.read.options import SftOptions, option_values
from trainkit.recipe.schema import Recipe
from trainkit.recipe.show.reference import (
    KeyReference,
    default_of,
    key_references,
    recipe_json_schema,
)
from trainkit.recipe.show.resolved import dump_resolved, shown_value, yaml_text

__all__ = [
    "Derived",
    "FoundKeys",
    "InvalidRecipe",
    "KeyReference",
    "LoadedRecipe",
    "Problem",
    "Recipe",
    "ResolvedValue",
    "SftOptions",
    "check_files",
    "default_of",
    "derive",
    "derive_training",
    "dump_resolved",
    "find_keys",
    "key_references",
    "load_recipe",
    "option_values",
    "read_chat_template",
    "recipe_json_schema",
    "recompute_of",
    "resolve_accumulation",
    "shown_value",
    "yaml_text",
]
