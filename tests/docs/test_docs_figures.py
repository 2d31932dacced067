"""The figures in the tables of the pages are those of rows in docs/benchmarks."""

import bisect
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "docs/zh/README.md",
    *(f"docs/guides/{name}.md" for name in ("speed", "memory", "fp8", "lora", "data", "parallel")),
]
CALCULATED = "### On paper"


def numbers_in(row):
    """Every number of a row, also in lists and dictionaries."""
    if isinstance(row, dict):
        row = list(row.values())
    if isinstance(row, list):
        for each in row:
            yield from numbers_in(each)
    elif isinstance(row, int | float) and not isinstance(row, bool):
        yield float(row)


@pytest.fixture(scope="module")
def measured():
    """Every measured number; in thousands, as milliseconds of seconds and in percent besides."""
    values = set()
    for file in (ROOT / "docs/benchmarks").glob("*.jsonl"):
        for line in file.read_text("utf-8").splitlines():
            values |= set(numbers_in(json.loads(line)))
    return sorted(value * unit for value in values for unit in (0.001, 1, 100, 1000))


def is_measured(text, measured):
    """Whether a row's value prints as this number."""
    half = 0.5 * 10 ** -len(text.partition(".")[2]) * 1.0001
    place = bisect.bisect_left(measured, float(text) - half)
    return place < len(measured) and measured[place] <= float(text) + half


def figures(page):
    """Numbers with a point or of four digits; no ratios, shares and (signed) differences."""
    section = ""
    for line in (ROOT / page).read_text("utf-8").splitlines():
        section = line if line.startswith("#") else section
        if not line.startswith("|") or section.startswith(CALCULATED):
            continue
        for cell in line.strip("|").split("|")[1:]:
            plain = re.sub(r"\([^)]*[x%倍][^)]*\)|`[^`]*`|<[^>]*>", "", cell.replace("**", ""))
            for found in re.findall(r"(?<![\w.,+-])\d[\d ]*(?:\.\d+)?(?![\w%x.])", plain):
                number = found.replace(" ", "")
                if "." in number or len(number) > 3:
                    yield number, line


def test_the_table_of_other_tools_recipes_is_of_rows():
    lines = (ROOT / "docs/benchmarks/foreign.jsonl").read_text("utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if "files" in row]
    page = (ROOT / "docs/guides/coming-from.md").read_text("utf-8")
    _, _, table = page.partition("| source | files |")
    for row, line in zip(rows, table.splitlines()[2 : 2 + len(rows)], strict=True):
        keys = ("files", "translated", "wrong", "checked", "refused", "another kind")
        wanted = [row[key] for key in (*keys, "not one training")]
        assert line.startswith(f"| {row['tool']}'s ")
        assert list(map(int, re.findall(r"\d+", line))) == wanted
    done, refused = (sum(row[key] for row in rows) for key in ("translated", "refused"))
    assert f"{done} of {done + refused}" in page
    shares = [f"{100 * r['translated'] / (r['translated'] + r['refused']):.0f}" for r in rows]
    assert f"{', '.join(shares[:-1])} and {shares[-1]}% are translated" in page


@pytest.mark.parametrize("page", PAGES)
def test_a_figure_of_a_table_is_a_row_s(page, measured):
    unknown = [
        (number, line) for number, line in figures(page) if not is_measured(number, measured)
    ]
    assert not unknown
