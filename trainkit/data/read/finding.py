"""Paths, directories and globs in, files of data out."""

import glob
from pathlib import Path

from trainkit.data.read.opening import SUFFIXES, container
from trainkit.errors import DataError


def resolve_files(path: str) -> list[Path]:
    """The files that ``path`` means, sorted by name.

    Raises:
        DataError: the file is missing, the glob matches nothing, the directory holds no data.
    """
    plain = Path(path).expanduser()
    if plain.is_file():
        return [plain]
    if plain.is_dir():
        found = [file for file in _files_below(plain) if is_data(file)]
        if not found:
            others = ", ".join(file.name for file in unread_files(path)[:3])
            raise DataError(
                f"the directory holds no {', '.join(SUFFIXES)} file"
                + (f"; it holds {others}" if others else ""),
                where=path,
                fix="name a directory with data files, or a file",
            )
        return found
    if glob.has_magic(path):
        matches = sorted(Path(m) for m in glob.glob(str(plain), recursive=True))  # noqa: PTH207 - absolute patterns too
        files = [file for file in matches if file.is_file()]
        if not files:
            raise DataError(
                "the glob matches no file", where=path, fix="check the pattern and its directory"
            )
        return files
    raise DataError(
        "there is no such file or directory", where=path, fix="check the path for a typo"
    )


def unread_files(path: str) -> list[Path]:
    """The files of a directory that are not taken for data; hidden ones do not count."""
    plain = Path(path).expanduser()
    if not plain.is_dir():
        return []
    return [file for file in _files_below(plain) if not is_data(file)]


def _files_below(directory: Path) -> list[Path]:
    """Every file of a directory, sorted, except hidden ones and those in hidden directories."""
    return sorted(
        file
        for file in directory.rglob("*")
        if file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(directory).parts)
    )


def is_data(file: Path) -> bool:
    """Whether a file in a directory is taken for data, by its name."""
    return container(file)[0] in SUFFIXES
