"""What a run's own recipe says that a later command must know."""

from pathlib import Path


def quantized_by(run: Path | None) -> str | None:
    """The quantisation of the base that a run trained over, or None.

    Args:
        run: a run directory, or None.
    """
    from trainkit.recipe import load_recipe

    resolved = None if run is None else run / "resolved.yaml"
    if resolved is None or not resolved.is_file():
        return None
    lora = load_recipe(resolved).recipe.lora
    return None if lora is None else lora.quantize
