"""Recipes: the schema, the YAML loader and overrides. No torch here."""
