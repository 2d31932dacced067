"""Pages of the documentation that are made from the code: a hook of mkdocs.

The README is the first page; commands and recipe keys come from the code, the tables of
measurements from their rows, and each source file that a page links to gets a page.
"""

from __future__ import annotations

import html
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_SOURCE_LINK = re.compile(
    r"\]\((?:\.\./)*((?:trainkit|scripts|configs|tests)/[\w./-]+|Dockerfile)\)"
)
_TOP = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
_MOST_ROWS = 400


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that no file in docs/ holds."""
    made = {page: (ROOT / name).read_text("utf-8") for name, page in _TOP.items()}
    made["reference/commands.md"] = "\n".join(commands())
    made["reference/recipe.md"] = "\n".join(recipe_keys())
    made["reference/measurements.md"] = "\n".join(measurements())
    made["adr.md"] = "\n".join(decisions())
    texts = [
        *made.values(),
        *((ROOT / "docs" / f.src_uri).read_text("utf-8") for f in _pages(files)),
    ]
    for path in sorted({path for text in texts for path in _SOURCE_LINK.findall(text)}):
        made[f"source/{path}.md"] = source(path)
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links that work in the repository work on the site."""
    up = "../" * page.file.src_uri.count("/")

    def moved(found: re.Match[str]) -> str:
        return f"]({up}source/{found[1]}.md)"

    text = _SOURCE_LINK.sub(moved, markdown)
    for name, target in _TOP.items():
        outside = r"\.\./" * (page.file.src_uri.count("/") + 1) if up else ""
        pattern = rf"\]\({outside}{re.escape(name)}(#[\w-]+)?\)"
        text = re.sub(pattern, rf"]({up}{target}\1)", text)
    if page.file.src_uri in _TOP.values():
        text = text.replace("](docs/", "](").replace('src="docs/', 'src="')
    text = re.sub(r"\]\((?:\.\./)*benchmarks/?\)", f"]({up}reference/measurements.md)", text)
    return "\n".join(_parted(text.split("\n")))


_FENCE = re.compile(r"\s*(```+|~~~+)")
_ITEM = re.compile(r"[-*] |1\. ")


def _parted(lines: list[str]) -> Iterator[str]:
    """Blank lines around code, and before lists and tables: GitHub needs none, this parser does."""
    fence, before = "", ""
    for line in lines:
        found = _FENCE.match(line)
        closes = bool(fence and found and line.strip() == fence)
        if not fence and before.strip() and line.strip():
            in_list = re.match(r"[-*] |\d+\. |\s", before)
            begins_list = _ITEM.match(line) and not in_list
            begins_table = line.startswith("|") and not before.startswith("|")
            begins_code = found and line[0] in "`~"
            if before == "\0" or begins_list or begins_table or begins_code:
                yield ""
        yield line
        if closes:
            fence = ""
        elif not fence and found:
            fence = found[1]
        before = "\0" if closes else line


def _pages(files: Files) -> Iterator[File]:
    return (file for file in files if file.src_uri.endswith(".md") and file.generated_by is None)


def source(path: str) -> str:
    """A file, or what a folder holds, as a page."""
    place = ROOT / path
    if place.is_dir():
        names = "\n".join(f"- `{each.name}`" for each in sorted(place.iterdir()))
        return f"# {path}\n\n{names}\n"
    kind = {".py": "python", ".yaml": "yaml", ".json": "json", ".sh": "bash"}.get(place.suffix, "")
    return f"# {path}\n\n~~~~{kind}\n{place.read_text('utf-8')}\n~~~~\n"


def commands() -> Iterator[str]:
    """Each command with its arguments and options."""
    from trainkit.cli.app import app

    yield "# Commands\n"
    root = typer.main.get_command(app)
    yield from _command(root, "trainkit", 2)


def _command(command: Any, name: str, level: int) -> Iterator[str]:
    command = command.load() if hasattr(command, "load") else command
    if hasattr(command, "commands"):
        for each, inner in command.commands.items():
            if not inner.hidden:
                yield from _command(inner, f"{name} {each}", level)
        return
    yield f"{'#' * level} {name}\n"
    yield html.escape(inspect.cleandoc(command.help or ""), quote=False) + "\n"
    yield "| option | |\n|---|---|"
    for parameter in command.params:
        if getattr(parameter, "hidden", False):
            continue
        is_option = parameter.param_type_name == "option"
        names = [*parameter.opts, *parameter.secondary_opts]
        shown = names if is_option else [parameter.metavar or parameter.name]
        code = ", ".join(f"`{each}`" for each in shown)
        yield f"| {_cell(code)} | {_cell(getattr(parameter, 'help', None) or '')} |"
    yield ""


def recipe_keys() -> Iterator[str]:
    """Each key of a recipe, section by section."""
    from trainkit.recipe.keys import key_references

    yield "# Recipe keys\n"
    yield "`trainkit config keys WORD` looks them up, by other tools' names too.\n"
    section = None
    for head, entry in sorted(  # stable: within a section as the schema has them
        ((_section(entry.key), entry) for entry in key_references()),
        key=lambda each: each[0] != "",
    ):
        if head != section:
            section = head
            title = f"`{head}:`" if head else "At the top level"
            yield f"\n## {title}\n\n| key | value | default | |\n|---|---|---|---|"
        default = "required" if entry.is_required else f"`{json.dumps(entry.default, default=str)}`"
        if isinstance(entry.default, dict) and entry.default:
            default = "that of its keys"
        yield f"| `{entry.key}` | {_cell(entry.type)} | {_cell(default)} | {_cell(entry.help)} |"


def _section(key: str) -> str:
    return key.partition(".")[0] if "." in key else ""


def measurements() -> Iterator[str]:
    """The rows of docs/benchmarks as tables."""
    yield "# Measurements\n"
    yield "Made from the rows in `docs/benchmarks`, which also hold versions and commits.\n"
    for file in sorted((ROOT / "docs/benchmarks").glob("*.jsonl")):
        rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        yield f"\n## {file.stem}\n\n[{file.name}](../benchmarks/{file.name}), {len(rows)} rows.\n"
        values = [row for row in rows if isinstance(row.get("value"), int | float)]
        shown, columns = (values, _VALUE_COLUMNS) if values else (rows, _columns(rows))
        if len(shown) > _MOST_ROWS:
            yield f"The first {_MOST_ROWS} of them:\n"
        yield f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
        for row in shown[:_MOST_ROWS]:
            yield f"| {' | '.join(_figure(row.get(column)) for column in columns)} |"


_VALUE_COLUMNS = ("case", "provider", "metric", "value", "unit", "gpu")
_MOST_COLUMNS = 9


def _columns(rows: list[dict[str, Any]]) -> list[str]:
    """What rows without one value of their own have in common: texts, numbers, switches."""
    keys = dict.fromkeys(key for row in rows for key in row if key not in ("bench", "commit"))
    plain = [k for k in keys if not any(isinstance(row.get(k), dict | list) for row in rows)]
    often = [k for k in plain if sum(k in row for row in rows) * 2 >= len(rows)]
    return often[:_MOST_COLUMNS]


def _figure(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return _cell("" if value is None else value)


def decisions() -> Iterator[str]:
    """The records of decisions."""
    yield "# Decisions\n"
    for file in sorted((ROOT / "docs/adr").glob("*.md")):
        title = file.read_text("utf-8").partition("\n")[0].lstrip("# ")
        yield f"- [{title}](adr/{file.name})"


def _cell(text: Any) -> str:
    return html.escape(" ".join(str(text).split()), quote=False).replace("|", "\\|")
