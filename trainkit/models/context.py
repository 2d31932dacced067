"""How long a text a model can read, by its ``config.json``."""

import math
from collections.abc import Mapping
from typing import Any

_LEARNED_POSITIONS = ("n_positions", "max_target_positions")
"""Where configurations of models with a table of positions keep its size."""


def learned_positions(config: Mapping[str, Any]) -> int | None:
    """The rows of its table of positions, beyond which nothing runs; None where it has no table."""
    sizes = (config.get(name) for name in _LEARNED_POSITIONS)
    return next((size for size in sizes if isinstance(size, int) and size > 0), None)


def context_of(config: Mapping[str, Any]) -> int | None:
    """The positions a model knows, its rope scaling included; None where it sets no bound."""
    config = {**config, **(config.get("text_config") or {})}
    table = learned_positions(config)
    if table is not None:
        return table
    limit = config.get("max_position_embeddings")
    if not isinstance(limit, int) or limit <= 0:
        return None
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        return limit
    kinds = [each for each in (scaling, *scaling.values()) if isinstance(each, Mapping)]
    return max(limit, *(_scaled(each, limit) for each in kinds))


def _scaled(scaling: Mapping[str, Any], limit: int) -> int:
    factor = scaling.get("factor")
    if scaling.get("rope_type", scaling.get("type")) in (None, "default", "llama3"):
        return limit  # Llama 3's limit is the scaled one already
    if not isinstance(factor, (int, float)) or not math.isfinite(factor):
        return limit
    return int((scaling.get("original_max_position_embeddings") or limit) * factor)
