"""Python, the packages and the compiler."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from trainkit.doctor.machine import Finding, judged

_INSTALL = "pip install trainkit  # or pip install -e . in a checkout"


def check_python() -> Iterator[Finding]:
    """The version against that of the package."""
    version = platform.python_version()
    try:
        needed = importlib.metadata.metadata("trainkit")["Requires-Python"] or ""
    except importlib.metadata.PackageNotFoundError:
        needed = ""
    fits = SpecifierSet(needed).contains(version, prereleases=True)
    yield judged(
        "python",
        f"{version} ({sys.executable}); trainkit needs {needed or 'what its package says'}",
        fault="error",
        fix=None if fits else "uv venv --python 3.12  # then install trainkit in it",
    )


def check_packages() -> Iterator[Finding]:
    """The versions that are installed against those that trainkit is tested with."""
    try:
        lines = importlib.metadata.requires("trainkit") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("packages", "error", "trainkit is not installed", _INSTALL)
        return
    # One line a package; those of the test extra say nothing about training.
    wanted_here = {
        requirement.name: requirement
        for requirement in map(Requirement, reversed(lines))
        if 'extra == "test"' not in str(requirement.marker)
    }
    for requirement in reversed(wanted_here.values()):
        optional = "extra" in str(requirement.marker or "")
        if requirement.marker and not optional and not requirement.marker.evaluate():
            continue
        command = f"pip install '{requirement.name}{requirement.specifier}'"
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            if not optional:
                yield Finding(requirement.name, "error", "not installed", command)
            continue
        fits = requirement.specifier.contains(version, prereleases=True)
        wanted = f", tested with {requirement.specifier}" if str(requirement.specifier) else ""
        yield judged(
            requirement.name, f"{version}{wanted}", fault="error", fix=None if fits else command
        )


def check_bytecode() -> Iterator[Finding]:
    """Without a place for compiled modules, every start compiles thousands of them again."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return
    cached = Path(importlib.util.cache_from_source(spec.origin))
    folder = next(each for each in cached.parents if each.exists())
    if cached.exists() or (not sys.dont_write_bytecode and os.access(folder, os.W_OK)):
        yield Finding("bytecode", "ok", "modules are compiled once")
        return
    why = "PYTHONDONTWRITEBYTECODE is set" if sys.dont_write_bytecode else f"{folder} is read-only"
    yield Finding(
        "bytecode",
        "warning",
        f"{why}: every start compiles some 5000 modules, about ten seconds",
        "unset PYTHONDONTWRITEBYTECODE; export PYTHONPYCACHEPREFIX=~/.cache/python",
    )


def check_compiler() -> Iterator[Finding]:
    """Triton compiles a launcher with the C compiler when a kernel runs for the first time."""
    named = os.environ.get("CC")
    found = shutil.which(named.split()[0]) if named and named.split() else None
    compiler = found or (None if named else shutil.which("cc") or shutil.which("gcc"))
    if compiler:
        yield Finding("c compiler", "ok", compiler)
    elif named:
        yield Finding("c compiler", "error", f"CC={named} is no program here", "unset CC")
    else:
        yield Finding(
            "c compiler",
            "warning",
            "none: Triton kernels and DeepSpeed's CPU optimizer cannot be compiled",
            "apt-get install -y build-essential",
        )
