"""Recipes: the schema, the YAML loader and overrides. No torch here."""

from trainkit.recipe.derived import Derived, derive, resolve_accumulation
from trainkit.recipe.keys import (
    InvalidRecipe,
    KeyReference,
    Problem,
    default_of,
    find_keys,
    key_references,
    on_resume,
    recipe_json_schema,
)
from trainkit.recipe.load import (
    LoadedRecipe,
    ResolvedValue,
    SftOptions,
    check_files,
    dump_resolved,
    load_recipe,
    option_values,
    read_chat_template,
    shown,
    yaml_text,
)
from trainkit.recipe.schema import Recipe

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
    "dump_resolved",
    "find_keys",
    "key_references",
    "load_recipe",
    "on_resume",
    "option_values",
    "read_chat_template",
    "recipe_json_schema",
    "resolve_accumulation",
    "shown",
    "yaml_text",
]
