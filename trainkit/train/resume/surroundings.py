"""What surrounds a recipe and decides the curve: versions, trainkit's own code, the device.

It brings no models: hosts compare it before anything slow is loaded.
"""

import hashlib
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

import trainkit
from trainkit.version import __version__

_VERSIONS = ("torch", "transformers", "accelerate", "peft", "tokenizers")

_COMPUTES = (
    "data",
    "kernels",
    "lora",
    "models",
    "objectives",
    "options",
    "parallel",
    "patching.py",
    "recipe",
    "train",
)
"""What of trainkit decides the numbers of a run; the rest shows, measures or uses them."""

_NOT = (
    "train/diagnose",
    "train/rehearse.py",
    "train/evaluations.py",
    "train/finish.py",
    "train/generation_eval.py",
    "train/hub.py",
    "train/dry_run.py",
    "recipe/keys.py",
    "recipe/write.py",
    "recipe/translate",
)


_version = cache(metadata.version)  # which reads a package's whole page


def versions(packages: Sequence[str]) -> dict[str, str]:
    compilers = ("triton",) if torch.cuda.is_available() else ()
    # A checkout that is only on the path has no metadata of its own.
    found = {"trainkit": __version__}
    for name in (*_VERSIONS, *compilers, *packages):
        try:
            found[name] = _version(name)
        except metadata.PackageNotFoundError:
            if name not in compilers:
                raise
    return found


@cache
def code_digest(parts: Sequence[str] = _COMPUTES) -> str:
    """A digest of trainkit's files that compute: a checkout changes without its version."""
    root = Path(trainkit.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(_files(root, parts)):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def _files(root: Path, parts: Sequence[str]) -> Iterator[Path]:
    for name in parts:
        path = root / name
        for file in [path] if path.is_file() else path.rglob("*.py"):
            place = file.relative_to(root).as_posix()
            if not place.startswith(_NOT):
                yield file


def gpu_name() -> str | None:
    """Kernels and sums differ from one kind of GPU to another."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
