"""What the documents claim is there: commands parse, recipes load, links and pictures exist."""

import contextlib
import json
import re
import shlex
from collections import Counter
from pathlib import Path

import pytest
import typer

from trainkit.cli.app import COMMANDS, LazyCommand, app, normalize
from trainkit.recipe import load_recipe
from trainkit.recipe.keys import FOREIGN
from trainkit.recipe.write import shipped_recipes

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

UsageError = typer.BadParameter.__base__  # of the click that this typer uses


def commands(document):
    """The lines of fenced bash blocks, continued lines joined, comments removed."""
    text = document.read_text(encoding="utf-8")
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield words


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_pictures_exist(document):
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_name_files_that_exist_and_recipes_that_load(document):
    for words in commands(document):
        if words[0] == "bash":
            assert (ROOT / words[1]).exists(), words
        if "--config" in words:
            config = words[words.index("--config") + 1]
            if config.startswith("configs/"):
                overrides = [word for word in words if re.match(r"[a-z_.]+=", word)]
                load_recipe(ROOT / config, overrides)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_names_in_them_exist(document):
    """`trainkit/models/linears.py`, and `OPS` of a file."""
    text = document.read_text(encoding="utf-8")
    if document.name == "LOG.md":  # dated entries keep the names of their day
        return
    for path in re.findall(r"`((?:trainkit|tests|scripts|docs|configs)/[\w./*-]+)`", text):
        assert "NAME" in path or "yours" in path or list(ROOT.glob(path)), path
    for name, path in re.findall(r"`(\w+)`\s+of\s+`((?:trainkit|tests)/[\w./]+\.py)`", text):
        code = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^(class |def )?{name}\b", code, re.MULTILINE), (name, path)


def parsed(words):
    """Parse the words after ``trainkit`` down to the last command; nothing is run."""
    command = typer.main.get_command(app)
    context = typer.Context(command)
    words = normalize(words)
    while hasattr(command, "commands"):
        _, command, words = command.resolve_command(context, words)
        command = command.load() if isinstance(command, LazyCommand) else command
        if hasattr(command, "commands") and not words:
            return
    with contextlib.suppress(typer.BadParameter):  # a file of the reader's, which is not here
        command.make_context(command.name, words)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_trainkit_commands_and_their_options_exist(document):
    for words in commands(document):
        if words[0] == "trainkit":
            parsed(words[1:])
        if words[:2] == ["trainkit", "new"] and words[2:] and words[2][0] != "-":
            assert words[2] in shipped_recipes()
            recipe = shipped_recipes()[words[2]]
            for other in commands(document):
                if "--config" in other and other[other.index("--config") + 1] == recipe.name:
                    load_recipe(recipe, [word for word in other if re.match(r"[a-z_.]+=", word)])
        if words[:3] == ["pip", "install", "."]:
            assert (ROOT / "pyproject.toml").exists()


def blocks(document):
    """The fenced blocks of a page with their languages."""
    return re.findall(
        r"^```(\w*)\n(.*?)^```", document.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )


CHECKED = {"bash", "yaml", "python", "json", ""}  # "": what a command prints
LEFT_TO_THE_READER = {
    "name_or_path:": "model.name_or_path=some/model",
    "train:": "data.train=a.jsonl",
}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_blocks_are_of_a_kind_that_is_checked_and_hold(document, tmp_path):
    """Commands have tests of their own above; pages of the tutorial are run."""
    for language, text in blocks(document):
        assert language in CHECKED, language
        if language == "python":
            compile(text, str(document), "exec")
        if language == "json":
            for line in text.splitlines():
                json.loads(line)
        if language == "yaml":
            recipe = tmp_path / "part.yaml"
            recipe.write_text(text, encoding="utf-8")
            load_recipe(recipe, [v for key, v in LEFT_TO_THE_READER.items() if key not in text])


@pytest.mark.parametrize("page", ["docs/guides/first-run.md", "docs/zh/first-run.md"])
def test_messages_that_a_page_explains_are_those_of_the_code(page):
    _, _, table = (ROOT / page).read_text("utf-8").rpartition("## ")
    code = " ".join(file.read_text("utf-8") for file in (ROOT / "trainkit").rglob("*.py"))
    code = re.sub(r'"\s+f?"', "", code)  # texts that go on in the next line
    quoted = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    assert len(quoted) >= 5
    for message in quoted[1:]:  # the first is the shell's
        for part in message.split("..."):
            assert part.strip() in code, message


def test_other_tools_keys_are_called_what_the_guide_says():
    text = (ROOT / "docs/guides/coming-from.md").read_text("utf-8")
    _, _, table = text.partition("| LLaMA-Factory | axolotl |")
    rows = table.partition("\n\n")[0].splitlines()[2:]
    assert len(rows) > 15
    for row in rows:
        *theirs, ours = row.strip("|").split("|")
        target = re.search(r"`([\w.]+)|a `(lora)` section", ours)
        for cell in filter(None, map(str.strip, theirs)):
            name = cell.strip("`")
            if name != "model_name_or_path":  # as transformers has it
                assert FOREIGN[name].target == (target[1] or "lora"), (name, ours)


def test_every_command_of_the_table_is_in_a_document():
    shown = {words[1] for each in DOCUMENTS for words in commands(each) if words[0] == "trainkit"}
    shown |= {
        name for name in COMMANDS for each in DOCUMENTS if f"`trainkit {name}" in each.read_text()
    }
    assert shown >= set(COMMANDS)


def test_the_readme_names_the_two_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "bash train.sh" in text
    assert "bash scripts/test.sh" in text
    assert "QUICKSTART_OUTPUT" not in text, "a place holder was left in"
    assert "bash scripts/test.sh" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_no_point_of_the_changelog_stands_twice():
    """A merge of two branches can bring lines back that one of them took out."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    points = re.findall(r"^- .*(?:\n  .*)*", text, re.MULTILINE)
    assert len(points) > 100
    assert [point for point, times in Counter(points).items() if times > 1] == []
    groups = re.findall(r"^### (.+)", text.split("\n## ")[1], re.MULTILINE)
    assert groups == ["Added", "Changed", "Fixed", "Removed", "Numerics"]
