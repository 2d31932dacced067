"""The documentation as a site: it builds without a warning, and its reference is the code's."""

import re
from pathlib import Path

import pytest
import typer
from commands import python

from trainkit.cli.app import app
from trainkit.recipe.keys import key_references

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs")
    target = tmp_path_factory.mktemp("site")
    python("-m", "mkdocs", "build", "--strict", "-q", "-d", target, cwd=ROOT)
    return target


def test_every_command_and_key_has_its_place(site):
    commands = (site / "reference/commands/index.html").read_text()
    for name, command in typer.main.get_command(app).commands.items():
        assert command.hidden or f"trainkit {name}" in commands
    keys = (site / "reference/recipe/index.html").read_text()
    for entry in key_references():
        assert f"<code>{entry.key}</code>" in keys


def options_of(command, name):
    """Every command below this one, with the names of its options and arguments."""
    command = command.load() if hasattr(command, "load") else command
    if hasattr(command, "commands"):
        for each, inner in command.commands.items():
            yield from options_of(inner, f"{name} {each}")
    elif not command.hidden:
        shown = (each for each in command.params if not getattr(each, "hidden", False))
        yield name, [spelling for each in shown for spelling in each.opts if spelling[0] == "-"]


def test_every_option_stands_under_its_command(site):
    page = (site / "reference/commands/index.html").read_text()
    parts = dict(re.findall(r'<h2 id="[^"]*">(trainkit [^<]*)(.*?)(?=<h2 |\Z)', page, re.DOTALL))
    for name, options in options_of(typer.main.get_command(app), "trainkit"):
        missing = [option for option in options if f"<code>{option}</code>" not in parts[name]]
        assert not missing, (name, missing)


def test_every_guide_is_in_the_navigation():
    config = (ROOT / "mkdocs.yml").read_text()
    for page in sorted((ROOT / "docs").glob("*/*.md")):
        if page.parent.name != "adr":
            assert f"{page.parent.name}/{page.name}" in config


def test_every_file_of_measurements_has_its_table(site):
    page = (site / "reference/measurements/index.html").read_text()
    parts = dict(re.findall(r'<h2 id="([^"]*)">(.*?)(?=<h2 |\Z)', page, re.DOTALL))
    for file in (ROOT / "docs/benchmarks").glob("*.jsonl"):
        rows = len(file.read_text("utf-8").splitlines())
        assert parts[file.stem].count("<tr>") > min(rows, 400) / 2, file.name


def test_lists_and_tables_are_not_read_as_text(site):
    """GitHub sees them right behind a line of text or code, Python-Markdown does not."""
    for page in site.rglob("*.html"):
        text = re.sub(r"<pre.*?</pre>", "", page.read_text(), flags=re.DOTALL)
        for paragraph in re.findall(r"<p>(.*?)</p>", text, re.DOTALL):
            assert not re.search(r"^(?:- |\* |1\. |\|)", paragraph, re.MULTILINE), (page, paragraph)
            assert "highlight" not in paragraph, (page, paragraph)


def test_nothing_is_fetched_from_elsewhere(site):
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|link|img)[^>]+(?:src|href)=\"(https?:[^\"]+)", page.read_text()
        )
        assert not loaded, page
