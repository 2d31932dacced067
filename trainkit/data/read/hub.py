"""Data sets from the Hugging Face hub, brought to a local parquet file."""

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainkit.errors import DataError
from trainkit.places import local_path


def hub_name(path: str) -> str | None:
    """The hub name that ``path`` means, or None if it means a local file."""
    if path.startswith("hf://"):
        return path.removeprefix("hf://").removeprefix("datasets/")
    return path if "/" in path and local_path(path) is None else None


def fetch(
    name: str,
    split: str,
    directory: Path,
    subset: str | None = None,
    files: Sequence[str] = (),
) -> Path:
    """Download a split (``datasets`` keeps its own cache) and write it as parquet.

    Args:
        name: ``org/name``.
        split: such as ``train`` or ``train[:1%]``.
        directory: gets ``<fingerprint>.parquet``, once.
        subset: the configuration's name, where there are several.
        files: those to read; none means all.

    Raises:
        DataError: the hub cannot be reached, or has no such data set or split.
    """
    import datasets

    chosen: dict[str, Any] = {"name": subset} if subset else {}
    if files:
        chosen["data_files"] = list(files)
    try:
        data = datasets.load_dataset(name, split=split, **chosen)
    except (OSError, ValueError) as error:
        raise DataError(
            f"there is no local file of this name, and the hub's data set {name!r} (split "
            f"{split!r}) cannot be loaded: {type(error).__name__}: {error}",
            where=name,
            fix="check the path or name; without a network, download it elsewhere and give the "
            "files (unset HF_HUB_OFFLINE where there is one)",
        ) from error
    target = directory / f"{data._fingerprint}.parquet"
    if not target.exists():
        directory.mkdir(parents=True, exist_ok=True)
        temporary = directory / f"tmp-{uuid.uuid4().hex}.parquet"
        data.to_parquet(str(temporary))
        temporary.replace(target)
    return target
