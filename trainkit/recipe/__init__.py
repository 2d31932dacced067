"""Recipes: the schema, the YAML loader and overrides. No torch here."""

from trainkit.recipe.derived import (
    Derived,
    derive,
    derive_training,
    recompute_of,
    resolve_accumulation,
)
from trainkit.recipe.files import check_files, read_chat_template
from trainkit.recipe.load import (
    LoadedRecipe,
    ResolvedValue,
    SftOptions,
    load_recipe,
    option_values,
)
from trainkit.recipe.problems import InvalidRecipe, Problem
from trainkit.recipe.reference import (
    KeyReference,
    default_of,
    find_keys,
    key_references,
    recipe_json_schema,
)
from trainkit.recipe.schema import Recipe
from trainkit.recipe.text import dump_resolved, shown_value, yaml_text

__all__ = [
    "Derived",
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
