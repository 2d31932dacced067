"""Recipes are written line by line, so that a test can say which line is at fault."""

import pytest

MINIMAL = "model: {name_or_path: m}\ndata: {train: [a.jsonl]}\n"


@pytest.fixture
def write_recipe(tmp_path):
    """Write a recipe file and return its path; without text, the smallest one that loads."""

    def write(text=MINIMAL, name="recipe.yaml"):
        path = tmp_path / name
        if isinstance(text, bytes):
            path.write_bytes(text)
        else:
            path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def load(write_recipe):
    """Load a recipe from its text."""
    from trainkit.recipe import load_recipe

    def load(text=MINIMAL, overrides=(), cli=None):
        return load_recipe(write_recipe(text), overrides, cli)

    return load


@pytest.fixture
def problems_of(load):
    """What is wrong with a recipe: a list of (line, what, fix)."""
    from trainkit.recipe import InvalidRecipe

    def problems_of(text, overrides=()):
        with pytest.raises(InvalidRecipe) as caught:
            load(text, overrides)
        assert caught.value.exit_code == 2
        found = []
        for problem in caught.value.problems:
            line = problem.where.rpartition(":")[2]
            found.append(
                (int(line) if line.isdecimal() else problem.where, problem.what, problem.fix)
            )
        return found

    return problems_of
