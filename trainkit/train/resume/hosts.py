"""What each host of a run was given, compared before anything slow is loaded: no torch."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainkit.parallel.agreement import refuse_early_disagreement
from trainkit.parallel.process import ProcessRank
from trainkit.recipe import LoadedRecipe, shown_value

_NOT_COMPARED = ("name", "training.output_dir", "training.hub_token", "global_batch_size")
_OF_A_HOST = ("data.cache_dir", "data.num_workers")
_READ_BYTES = 1 << 26
"""Of larger files the size is compared here, and the rows when they have been read."""


def settings_of(loaded: LoadedRecipe) -> dict[str, Any]:
    """Every value of a recipe as JSON, what only the machine decides and secrets left out."""
    values = {
        value.key: shown_value(value)
        for value in loaded.values()
        if not value.key.startswith(_NOT_COMPARED)
    }
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain


def settings_of_all(loaded: LoadedRecipe) -> dict[str, Any]:
    """The values that every host has to share."""
    return {key: value for key, value in settings_of(loaded).items() if key not in _OF_A_HOST}


def refuse_unlike_hosts(loaded: LoadedRecipe, resume: object) -> None:
    """Stop where a host has another recipe, other packages or other files.

    Raises:
        RecipeError: naming the process and what it has.
    """
    process = ProcessRank.from_environment()
    if process.world_size == 1:
        return
    from trainkit.train.resume.surroundings import code_digest, versions

    around = {"continues": str(resume), "code": code_digest(), "versions": versions(())}
    refuse_early_disagreement(process, {**settings_of_all(loaded), **around, **_files(loaded)})


def _files(loaded: LoadedRecipe) -> dict[str, str]:
    """The files of data by name, with what tells them from others of that name."""
    data = loaded.recipe.data
    paths: Iterable[Path] = (Path(s.path).expanduser() for s in (*data.train, *data.eval_sources))
    return {str(path): _told_apart(path) for path in paths if path.is_file()}


def _told_apart(path: Path) -> str:
    size = path.stat().st_size
    if size > _READ_BYTES:
        return f"{size} bytes"
    return f"{size} bytes, sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
