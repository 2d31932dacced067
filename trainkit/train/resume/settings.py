"""The values of a recipe as they are compared: with a checkpoint's, and with another host's.

Read before torch is loaded.
"""

import json
from typing import Any

from trainkit.recipe import LoadedRecipe, shown_value

_NOT_COMPARED = ("name", "training.output_dir", "training.hub_token", "global_batch_size")


def settings_of(loaded: LoadedRecipe) -> dict[str, Any]:
    """Every value of a recipe as JSON, what only the machine decides and secrets left out."""
    values = {
        value.key: shown_value(value)
        for value in loaded.values()
        if not value.key.startswith(_NOT_COMPARED)
    }
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain
