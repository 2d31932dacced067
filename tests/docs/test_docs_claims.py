"""What the documents claim is there: commands parse, recipes load, links and pictures exist."""

import re
import shlex
from pathlib import Path

import pytest

from trainkit.recipe import load_recipe

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


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


def test_the_readme_names_the_two_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "bash train.sh" in text
    assert "bash scripts/test.sh" in text
    assert "QUICKSTART_OUTPUT" not in text, "a place holder was left in"
    assert "bash scripts/test.sh" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
