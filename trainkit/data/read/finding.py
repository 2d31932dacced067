"""Paths, directories, globs and names on the Hugging Face hub in, files of data out."""

import glob
import os
import uuid
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from trainkit.data.read.reading import SUFFIXES, TEXT, UNREADABLE, container
from trainkit.errors import DataError
from trainkit.hub import check_hub
from trainkit.places import local_path, regular


def resolve_files(path: str) -> list[Path]:
    """The files that ``path`` means, sorted by name.

    Raises:
        DataError: the file is missing, the glob matches nothing, the directory holds no data.
    """
    plain = Path(path).expanduser()
    if plain.is_dir():
        found = _data_below(plain)
        if not found:
            unread = unread_files(path)
            others = ", ".join(file.name for file in unread[:3])
            ways = [
                UNREADABLE[k] for k in (container(file)[0] for file in unread) if k in UNREADABLE
            ]
            raise DataError(
                f"the directory holds no {', '.join((*SUFFIXES, TEXT))} file"
                + (f"; it holds {others}" if others else ""),
                where=path,
                fix=ways[0] if ways else "name a directory with data files, or a file",
            )
        return found
    if plain.exists() or plain.is_symlink():
        return _once([plain])
    if glob.has_magic(path):
        files = _once(file for file in _matching(plain) if not file.is_dir())
        if not files:
            raise DataError(
                "the glob matches no file", where=path, fix="check the pattern and its directory"
            )
        return files
    raise DataError(
        "there is no such file or directory", where=path, fix="check the path for a typo"
    )


def _matching(pattern: Path) -> list[Path]:
    """What a pattern matches; ``**`` by our own walk, since glob gets lost in circles of links."""
    if "**" not in pattern.parts:
        return sorted(Path(found) for found in glob.glob(str(pattern)))  # noqa: PTH207 (absolute)
    first = next(n for n, part in enumerate(pattern.parts) if glob.has_magic(part))
    root = Path(*pattern.parts[:first])
    files = _files_below(root) if root.is_dir() else []
    return [f for f in files if _fits(f.relative_to(root).parts, pattern.parts[first:])]


def _fits(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_fits(parts[start:], pattern[1:]) for start in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _fits(parts[1:], pattern[1:])


def unread_files(path: str) -> list[Path]:
    """The files of a directory that are not read; hidden ones do not count."""
    plain = Path(path).expanduser()
    if not plain.is_dir():
        return []
    read = set(_data_below(plain))
    return [file for file in _files_below(plain) if file not in read]


def _data_below(directory: Path) -> list[Path]:
    """The files of a directory that are taken for data.

    Raises:
        DataError: a name that no text file could hold, or a link to nothing.
    """
    files = _files_below(directory)
    found = [file for file in files if is_data(file)]
    # Next to rows a text is a licence or a note; a folder of nothing but texts is a corpus.
    return _once(found or [file for file in files if container(file)[0] == TEXT])


def _once(files: Iterable[Path]) -> list[Path]:
    """The same, sorted, without the links to others of them: no row is read twice."""
    found: dict[Path, Path] = {}
    for file in files:
        _refuse_name(file)
        regular(file, DataError)
        whole = file.resolve()
        if whole not in found or (found[whole].is_symlink() and not file.is_symlink()):
            found[whole] = file
    return sorted(found.values())


def _files_below(directory: Path) -> list[Path]:
    """Everything in a directory but directories, sorted, without what is hidden.

    Links to directories are followed, each directory once: links may go in circles.
    """
    found: list[Path] = []
    seen: set[Path] = set()
    todo, links = [directory], list[Path]()
    # Links come last: one must not take the place of the directory that it leads to.
    while todo or links:
        place = todo.pop() if todo else links.pop(0)
        whole = place.resolve()
        if whole in seen:
            continue
        seen.add(whole)
        try:
            inside = sorted(place.iterdir())
        except OSError as error:
            raise DataError(
                f"the directory cannot be read: {error.strerror}",
                where=str(place),
                fix="check its permissions",
            ) from error
        for each in inside:
            if each.name.startswith("."):
                continue
            if each.is_dir():
                (links if each.is_symlink() else todo).append(each)
            else:
                found.append(each)
    return sorted(found)


SIDECARS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""What other tools write next to data: it describes files and holds no rows."""


def is_data(file: Path) -> bool:
    """Whether a file in a directory is taken for data, by its name."""
    return container(file)[0] in SUFFIXES and file.name not in SIDECARS


def _refuse_name(file: Path) -> None:
    try:
        str(file).encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"the file's name is not UTF-8: {os.fsencode(file.name)!r}",
            where=str(file.parent).encode("utf-8", "replace").decode(),
            fix="rename it: every record of the run names its files",
        ) from error


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
    from datasets.naming import camelcase_to_snakecase
    from huggingface_hub import constants

    owner, slash, last = name.rpartition("/")
    copies = f"{owner}{slash and '___'}{camelcase_to_snakecase(last)}"
    fix = "check the path or name; without a network, download it elsewhere and give the files"
    check_hub(name, DataError, name, fix, Path(datasets.config.HF_DATASETS_CACHE, copies))
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE
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
            fix=fix,
        ) from error
    target = directory / f"{data._fingerprint}.parquet"
    if not target.exists():
        directory.mkdir(parents=True, exist_ok=True)
        temporary = directory / f"tmp-{uuid.uuid4().hex}.parquet"
        data.to_parquet(str(temporary))
        temporary.replace(target)
    return target
