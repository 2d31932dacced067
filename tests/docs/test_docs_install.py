"""Ways to install: one oldest Python everywhere, the image's file, the offline set."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
    # compressed-tensors is a test's own, and only from Python 3.11 on.
    assert newer - older == {"compressed-tensors"}
    assert not older - newer


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
