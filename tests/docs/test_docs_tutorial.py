"""The tutorial runs, and its figures are those of the benchmarks and the log."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs" / "tutorial"


def number(page):
    """10 of 10-scan.md."""
    return int(page.name.partition("-")[0])


PAGES = sorted(TUTORIAL.glob("[0-9]*-*.md"), key=number)


def run_pages(numbers, **variables):
    # PYTHONSAFEPATH, which a command in this process has left, hides pages from each other.
    hidden = ("TRITON_INTERPRET", "PYTHONSAFEPATH")
    environment = {k: v for k, v in os.environ.items() if k not in hidden} | variables
    return subprocess.run(
        [sys.executable, "docs/tutorial/run.py", *map(str, numbers)],
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_the_index_lists_the_pages_in_order():
    index = (TUTORIAL / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in PAGES] == re.findall(r"^\| \[.*?\]\((.*?)\)", index, re.MULTILINE)


@pytest.fixture(scope="module")
def outputs():
    """What each page prints under the interpreter; one process, which loads torch once."""
    ran = run_pages([number(page) for page in PAGES], TRITON_INTERPRET="1")
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    parts = re.split(r"^== (\S+)\n", ran.stdout, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs_under_the_interpreter_with_the_command_it_states(page, outputs):
    command = f"`TRITON_INTERPRET=1 python docs/tutorial/run.py {number(page)}`"
    assert command in page.read_text(encoding="utf-8")
    assert "error" in outputs[page.name], "a page checks its results"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU needs no interpreter")
def test_without_a_gpu_a_page_asks_for_the_interpreter(monkeypatch):
    """The line that every page imports first; a process of its own would load torch once more."""
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    assert all("from lesson import" in page.read_text("utf-8") for page in PAGES)
    with pytest.raises(SystemExit, match="TRITON_INTERPRET=1"):
        runpy.run_path(str(TUTORIAL / "lesson.py"))


@pytest.mark.gpu
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs_on_a_gpu_and_prints_times(page):
    ran = run_pages([number(page)])
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    assert "| provider |" in ran.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_tables_hold_what_was_measured(page, monkeypatch):
    monkeypatch.syspath_prepend(str(TUTORIAL))
    import tables

    text = page.read_text(encoding="utf-8")
    assert "| provider |" in text, "a page shows measurements"
    assert text == tables.updated(text, tables.measured()), "run docs/tutorial/tables.py"


def figures(text):
    """The numbers in a text, without those in its links."""
    return set(re.findall(r"\d+(?:\.\d+)?", re.sub(r"\]\([^)]*\)", "]", text)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_cites_the_log_stands_in_the_log(page):
    logged = figures((ROOT / "docs" / "LOG.md").read_text(encoding="utf-8"))
    paragraphs = re.split(r"\n\n|\n(?=- )", page.read_text(encoding="utf-8"))
    for paragraph in paragraphs:
        if "(../LOG.md)" in paragraph:
            assert figures(paragraph) <= logged, (paragraph, figures(paragraph) - logged)


TERMS = {
    "multiprocessor": "multiprocessor",
    "warp": r"warps?\b",
    "register": r"registers?\b",
    "L2": r"L2\b",
    "shared memory": "shared memory",
    "stage": r"stages?\b",
    "spill": r"spills?\b",
    "tensor core": "tensor cores?",
}


def prose(page):
    """A page without its code and its tables."""
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return "\n".join(line for line in text.splitlines() if not line.startswith("|"))


@pytest.mark.parametrize("term", TERMS)
def test_a_word_of_the_hardware_is_explained_where_it_first_stands(term):
    text = "\n".join(prose(page) for page in PAGES)
    first = re.search(rf"(\*\*)?(?:\w+ )?({TERMS[term]})", text, re.IGNORECASE)
    assert first, term
    assert first[1] == "**", text[first.start() : first.end() + 60]
