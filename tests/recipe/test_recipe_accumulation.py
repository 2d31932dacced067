"""One global batch for any number of processes."""

import pytest

from trainkit.errors import RecipeError
from trainkit.recipe import resolve_accumulation


def recipe_with(load, total, micro, accumulation):
    training = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation}
    given = ", ".join(f"{key}: {value}" for key, value in training.items() if value)
    top = f"global_batch_size: {total}\n" if total else ""
    text = f"{top}model: {{name_or_path: m}}\ndata: {{train: [a]}}\ntraining: {{{given}}}\n"
    return load(text).recipe


@pytest.mark.parametrize(
    ("total", "micro", "accumulation", "world_size", "steps"),
    [
        (256, 16, None, 1, 16),
        (256, 16, None, 8, 2),
        (256, 16, 2, 8, 2),
        (64, None, None, 4, 2),  # transformers' own micro-batch is 8
        (None, 4, 3, 8, 3),
        (None, 4, None, 8, 1),
    ],
)
def test_steps(load, total, micro, accumulation, world_size, steps):
    recipe = recipe_with(load, total, micro, accumulation)
    assert resolve_accumulation(recipe, world_size) == steps


@pytest.mark.parametrize(
    ("total", "micro", "accumulation", "world_size", "message"),
    [
        (256, 16, None, 3, "not a multiple of 48"),
        (16, 16, None, 3, "take 48, or"),
        (256, 16, 4, 8, "16 rows x 4 = 512"),
        (256, 16, 1, 8, "16 rows x 1 = 128"),
    ],
)
def test_disagreement_is_told(load, total, micro, accumulation, world_size, message):
    recipe = recipe_with(load, total, micro, accumulation)
    with pytest.raises(RecipeError, match=message) as caught:
        resolve_accumulation(recipe, world_size)
    assert caught.value.exit_code == 2
