"""The DeepSpeed configurations that have a name.

The files lie in ``trainkit/configs/deepspeed``, so that an installed trainkit has them.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from trainkit.errors import RecipeError
from trainkit.recipe.suggest import ask, nearest

DEFAULT_PRESET = "zero2"
"""What a bare ``--deepspeed`` means."""

_DIRECTORY = Path(__file__).parents[1] / "configs" / "deepspeed"

PRESETS: Mapping[str, Path] = {
    name: _DIRECTORY / f"{name}.json" for name in ("zero1", "zero2", "zero3", "zero3_offload")
}
"""Preset to file."""


def deepspeed_path(choice: str) -> Path:
    """The file of a preset, or the path itself."""
    return PRESETS.get(choice) or Path(choice).expanduser()


def check_deepspeed(choice: str | None, where: str | None = None) -> None:
    """Refuse a configuration that is not there or not a JSON object.

    Args:
        choice: a preset's name, a path, or None.
        where: the place to name in the error.

    Raises:
        RecipeError: with the nearest preset.
    """
    if choice is None:
        return
    path = deepspeed_path(choice)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        hint = ask(nearest(choice, PRESETS))
        raise RecipeError(
            f"there is no DeepSpeed preset {choice!r} and no file {path.absolute()}",
            where=where,
            fix=f"{hint or ''} The presets are {', '.join(PRESETS)}".strip(),
        ) from error
    except (RecursionError, ValueError) as error:
        raise RecipeError(f"not JSON: {error}", where=str(path), fix="mend the file") from error
    if not isinstance(content, dict):
        raise RecipeError("not a JSON object", where=str(path), fix="mend the file")
    for key in ("zero_optimization", "fp16", "bf16", "optimizer", "scheduler"):
        if not isinstance(content.get(key, {}), dict):
            raise RecipeError(
                f"{key}: {content[key]!r} must be an object", where=str(path), fix="mend the file"
            )
    stage = content.get("zero_optimization", {}).get("stage", 0)
    if type(stage) is not int or stage not in range(4):
        raise RecipeError(
            f"zero_optimization.stage: {stage!r} must be 0, 1, 2 or 3",
            where=str(path),
            fix="write the number without quotes",
        )
