"""How long a text a model can read, by its ``config.json``."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

_TABLES = ("n_positions", "max_target_positions", "max_seq_len")
"""Where configurations of models with a table of positions, or of slopes, keep its size."""


def context_of(config: Mapping[str, Any]) -> int | None:
    """The positions a model knows, its rope scaling included; None where it sets no bound."""
    config = {**config, **(config.get("text_config") or {})}
    table = _first(config, _TABLES)
    if table is not None:
        return table
    limit = _first(config, ("max_position_embeddings", "model_max_length"))
    if limit is None:
        return None
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping) or str(config.get("model_type")).startswith("gemma3"):
        return limit  # Gemma 3's limit is the scaled one already
    kinds = [each for each in (scaling, *scaling.values()) if isinstance(each, Mapping)]
    return max(limit, *(_scaled(each, limit) for each in kinds))


def table_of(config: Mapping[str, Any], model: Any | None) -> int | None:
    """The rows of its table of positions, beyond which nothing runs; None where it has no table.

    Of a text model's configuration; without the model a table is found by its key alone.
    """
    found = _first(config, _TABLES)
    limit = context_of(config)
    if found is not None or limit is None or model is None:
        return found
    sizes = {getattr(each, "num_embeddings", 0) for each in model.modules()}
    # OPT's and BioGPT's begin with two rows that no position takes.
    is_table = sizes & {limit, limit + 2} - {config.get("vocab_size")}
    return limit if is_table else None


def _first(config: Mapping[str, Any], names: Sequence[str]) -> int | None:
    sizes = (config.get(name) for name in names)
    return next((size for size in sizes if isinstance(size, int) and size > 0), None)


def _scaled(scaling: Mapping[str, Any], limit: int) -> int:
    factor = scaling.get("factor")
    if scaling.get("rope_type", scaling.get("type")) in (None, "default", "llama3"):
        return limit  # Llama 3's limit is the scaled one already
    if not isinstance(factor, (int, float)) or not math.isfinite(factor):
        return limit
    return int((scaling.get("original_max_position_embeddings") or limit) * factor)
