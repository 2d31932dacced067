"""Ways to install: one oldest Python everywhere, the image's file, the offline set."""

import contextlib
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
PINS = (ROOT / "constraints.txt").read_text(encoding="utf-8")
IMAGE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
WHEELHOUSE = ROOT / "scripts" / "wheelhouse.sh"
(OLDEST,) = re.findall(r'^requires-python = ">=(3\.\d+)"', PROJECT, re.MULTILINE)


def test_the_oldest_python_is_one_number():
    """mypy and ruff read the code as that version: what only newer ones have is an error."""
    digits = OLDEST.replace(".", "")
    assert f'[tool.mypy]\npython_version = "{OLDEST}"' in PROJECT
    assert f'target-version = "py{digits}"' in PROJECT
    assert f'"Programming Language :: Python :: {OLDEST}"' in PROJECT
    assert f"Python >= {OLDEST}" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_what_is_pinned_for_new_pythons_is_pinned_for_the_oldest():
    newer = set(re.findall(r'^([\w.-]+)==\S+; python_version >= "3', PINS, re.MULTILINE))
    older = set(re.findall(r'^([\w.-]+)==\S+; python_version < "3', PINS, re.MULTILINE))
    # A test's own, which exists from Python 3.11 on only.
    assert newer - older == {"compressed-tensors"}
    assert not older - newer


def wanted_by_the_oldest():
    """Every requirement, pins included, that holds on the oldest Python."""
    _, _, tables = PROJECT.partition("dependencies = [")
    listed = [
        *re.findall(r'"([\w.-]+[><=][^"]*)"', tables.partition("[project.scripts]")[0]),
        *re.findall(r"^[\w.-]+==.*$", PINS, re.MULTILINE),
    ]
    for text in listed:
        requirement = Requirement(text)
        on_oldest = {"python_version": OLDEST, "python_full_version": f"{OLDEST}.0"}
        if requirement.marker is None or requirement.marker.evaluate(on_oldest):
            yield requirement


def test_a_version_that_the_oldest_python_gets_runs_on_it():
    """Held against what the installed packages say of themselves."""
    wanted = list(wanted_by_the_oldest())
    assert len(wanted) > 60
    names = {each.name.lower() for each in wanted}
    assert {"torch", "trl", "import-linter", "lm-eval", "xllamacpp"} <= names
    for requirement in wanted:
        with contextlib.suppress(metadata.PackageNotFoundError):
            version = metadata.version(requirement.name)
            exact = any(each.operator == "==" for each in requirement.specifier)
            if exact and requirement.specifier.contains(version):
                runs_on = metadata.metadata(requirement.name)["Requires-Python"] or ""
                assert SpecifierSet(runs_on).contains(f"{OLDEST}.99"), (requirement, runs_on)


def test_the_image_is_made_of_what_is_there():
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8")
    for names in re.findall(r"^COPY (?!--)(.+) \S+$", IMAGE, re.MULTILINE):
        for name in names.split():
            assert (ROOT / name).exists(), name
            assert f"!{name}\n" in ignore, f"{name} does not reach the builder"
    (extras,) = re.findall(r"^ARG EXTRAS=(\S+)", IMAGE, re.MULTILINE)
    for extra in extras.split(","):
        assert re.search(rf"^{extra} = \[", PROJECT, re.MULTILINE), extra
    assert re.search(r"^USER [1-9]", IMAGE, re.MULTILINE), "not root"


def test_the_image_passes_its_linter():
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if linter is None:
        pytest.skip("hadolint is not installed; the test extras bring it")
    ran = subprocess.run(
        [linter, "Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout


def wheelhouse(*arguments):
    ran = subprocess.run(
        ["bash", WHEELHOUSE, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    return ran.returncode, ran.stdout + ran.stderr


def test_the_wheelhouse_says_how_it_is_used_and_keeps_one_set_apart(tmp_path):
    code, text = wheelhouse("--help")
    assert code == 0
    assert "pip install --no-index" in text
    code, text = wheelhouse("--cup")
    assert code == 2
    assert "--cup" in text
    (tmp_path / "old.whl").touch()
    code, text = wheelhouse(tmp_path)
    assert code == 2
    assert "not empty" in text
