"""What a run's own recipe says that a later command must know."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunSettings:
    """How a run held its base model.

    Attributes:
        quantize: ``nf4``, ``fp8``, or None for plain weights.
        dtype: of the weights in memory, or None where it is not known.
    """

    quantize: str | None = None
    dtype: str | None = None


def run_settings(run: Path | None) -> RunSettings:
    """Read a run's resolved recipe.

    Args:
        run: a run directory, or None.

    Returns:
        The settings; empty without a run, or where the run left no recipe.
    """
    from trainkit.recipe import load_recipe

    resolved = None if run is None else run / "resolved.yaml"
    if resolved is None or not resolved.is_file():
        return RunSettings()
    recipe = load_recipe(resolved).recipe
    return RunSettings(recipe.lora.quantize if recipe.lora else None, recipe.model.dtype)
