"""The wheel works away from the clone: it carries the recipes, and no message points outside it."""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The python of a fresh environment with the wheel in it; what it needs is lent by this one."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a copy: building leaves files behind
    shutil.copytree(ROOT / "trainkit", source / "trainkit", ignore=lambda *_: ["__pycache__"])
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet"]
    subprocess.run([*build, "--wheel-dir", folder, source], check=True, cwd=folder)
    (wheel,) = folder.glob("trainkit-*.whl")
    venv.create(folder / "environment", with_pip=False)
    python = folder / "environment" / "bin" / "python"
    purelib = Path(
        subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
    )
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*install, "--target", purelib, wheel], check=True, cwd=folder)
    # Behind the environment's own folder, so that the wheel's trainkit is found first.
    (purelib / "lent.pth").write_text(sysconfig.get_paths()["purelib"])
    return python


def run(python, folder, *arguments):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [python, "-m", "trainkit.cli.app", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_quickstart_trains_from_an_installed_wheel(installed, tmp_path):
    made = run(installed, tmp_path, "new", "quickstart")
    assert made.returncode == 0, made.stderr
    done = run(
        installed,
        tmp_path,
        *("sft", "--config", "quickstart.yaml", "training.max_steps=3", "generation_eval=null"),
        "data.train=[quickstart/held_out.jsonl]",  # a hundredth of the rows
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / done.stdout.splitlines()[-1] / "final" / "model.safetensors").is_file()


def test_every_recipe_of_the_clone_is_in_the_wheel(installed, tmp_path):
    listed = run(installed, tmp_path, "new", "--json").stdout
    for path in (ROOT / "configs").glob("*.yaml"):
        assert f'"name": "{path.stem}"' in listed
    written = run(installed, tmp_path, "new", "qwen2-7b-lora", "-o", "mine.yaml")
    assert written.returncode == 0
    shown = run(installed, tmp_path, "config", "show", "mine.yaml", "deepspeed=zero2")
    assert shown.returncode == 0, shown.stderr
    again = run(installed, tmp_path, "new", "qwen2-7b-lora", "-o", "mine.yaml")
    assert again.returncode == 2
    assert "not overwritten" in again.stderr
    assert "qwen2-7b-lora" in run(installed, tmp_path, "new", "qwen2-7b-lroa").stderr


def test_no_message_points_to_a_folder_that_only_a_clone_has():
    only_in_a_clone = re.compile(r"\b(configs|docs|scripts|tests)/|CONTRIBUTING")
    found = []
    for path in sorted((ROOT / "trainkit").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        strings = [
            node.value
            for call in ast.walk(tree)
            if isinstance(call, ast.Call)
            for node in ast.walk(call)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        found += [(path.name, text) for text in strings if only_in_a_clone.search(text)]
    assert not found
