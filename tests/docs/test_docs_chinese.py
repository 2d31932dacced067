"""The Chinese pages: what can be typed or copied is what the English ones have."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAIRS = {
    "docs/zh/README.md": "README.md",
    "docs/zh/first-run.md": "docs/guides/first-run.md",
    "docs/zh/recipes.md": "docs/guides/recipes.md",
}
WHOLE = ["docs/zh/README.md", "docs/zh/first-run.md"]


def code_of(path):
    """The lines of fenced blocks, stripped."""
    text = (ROOT / path).read_text(encoding="utf-8")
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    return [line.strip() for block in blocks for line in block.splitlines() if line.strip()]


@pytest.mark.parametrize("page", PAIRS)
def test_code_is_that_of_the_english_page(page):
    english = set(code_of(PAIRS[page]))
    resumed = "trainkit sft --resume train_model/RUN"  # in a sentence there
    assert {line for line in code_of(page) if line not in english} <= {resumed}


def figures(path):
    """The numbers of a page, those in its links left out."""
    text = re.sub(r"\]\([^)]*\)", "]", (ROOT / path).read_text(encoding="utf-8"))
    return set(re.findall(r"\d[\d .]*\d", text))


@pytest.mark.parametrize("page", WHOLE)
def test_a_whole_page_has_all_of_the_english_one(page):
    english = PAIRS[page]
    assert code_of(page) == code_of(english)
    texts = [(ROOT / each).read_text(encoding="utf-8") for each in (page, english)]
    heads, rows = ([re.findall(p, t, re.MULTILINE) for t in texts] for p in (r"^#+ ", r"^\| "))
    assert heads[0] == heads[1]
    if page != "docs/zh/README.md":  # whose list of guides is shorter
        assert len(rows[0]) == len(rows[1])
    assert {n for n in figures(english) if " " in n.strip()} <= figures(page), "of the tables"
