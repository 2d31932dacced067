"""Reading another tool's file: YAML, JSON, a command line, a script or a notebook; none is run."""

import ast
import contextlib
import functools
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainkit.errors import RecipeError
from trainkit.recipe.document import parse_value, read_document, text_of
from trainkit.recipe.translate.draft import Theirs
from trainkit.recipe.translate.script import read_script

_LARGEST = 2**24
_TOOLS = ("axolotl", "llamafactory-cli", "lmf", "swift", "megatron", "trl", "unsloth")
_RUNNERS = ("python", "python3", "accelerate", "torchrun", "deepspeed", "uv", "llamafactory-cli")
_COMMENT = r"""('[^']*'|"(?:\\.|[^"])*")|(?<!\S)#.*"""
"""A text in quotes, or a comment: a # inside a word, such as `data#500`, begins none."""
_TRAINS = ("train", "sft", "pt", "rlhf", "dpo", "grpo", "kto", "rloo", "reward")


def read_theirs(path: Path) -> Theirs:
    if path.suffix in (".yaml", ".yml"):
        return Theirs(path, read_document(path).values)
    if path.is_file() and path.stat().st_size > _LARGEST:
        raise RecipeError("this is no recipe: it is larger than 16 MiB", where=str(path))
    text = text_of(path)
    if path.suffix == ".ipynb":
        return read_script(path, cells(path, text))
    if path.suffix == ".py" or re.match(r"(#!.*python|from |import |\"\"\")", text):
        return read_script(path, text)
    if path.suffix == ".json" or text.lstrip().startswith("{"):
        return Theirs(path, _json(path, text))
    return _command(path, text)


def _json(path: Path, text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"not JSON: {error}", where=str(path)) from error
    if not isinstance(values, dict):
        raise RecipeError("a recipe is a mapping of keys", where=str(path))
    return values


def cells(path: Path, text: str) -> str:
    """A notebook's code; what is for the shell is left out."""
    cells = _json(path, text).get("cells") or []
    code = ["".join(c.get("source") or "") for c in cells if c.get("cell_type") == "code"]
    code = [re.sub(r"^\s*[!%].*$", "", cell, flags=re.M) for cell in code]
    at = next((n for n, cell in enumerate(code, 1) if ".train(" in cell), len(code))
    return "\n".join([*code[:at], *filter(_is_python, code[at:])])  # others end in an error there


def _is_python(text: str) -> bool:
    with contextlib.suppress(SyntaxError, ValueError):
        return bool(ast.parse(text))
    return False


def _command(path: Path, text: str) -> Theirs:
    """The one command of a file that trains; a file that it names is read with it."""
    found = list(_commands(path, text))
    if not found:
        raise RecipeError(
            "neither YAML, nor JSON, nor a script, nor a command line with --options",
            where=str(path),
            fix="give the file that the other tool is started with",
        )
    training = [each for each in found if each.program.split(" ")[-1] in _TRAINS]
    training = training or [each for each in found if each.program.endswith(".py")] or found[:1]
    if len(training) > 1:
        names = ", ".join(each.program for each in training[:4])
        raise RecipeError(
            f"there are {len(training)} commands that train in it: {names}",
            where=str(path),
            fix="put the one you mean into a file of its own",
        )
    training[0].launcher["before"] = [each.values for each in found if each is not training[0]]
    return training[0]


def _commands(path: Path, text: str) -> Iterator[Theirs]:
    if re.search(r"\\[ \t]*\n([ \t]*#.*\n)+[ \t]*--?\w", text):
        raise RecipeError(
            "a comment between the lines of a command ends it: what follows is not given to it",
            where=str(path),
            fix="put the comment above the command",
        )
    unsure = _unsure("\n".join(_lines(text)))
    variables = {name: f"${name}" for name in unsure}
    for line in _lines(text):
        try:
            tokens = shlex.split(_filled(re.sub(_COMMENT, r"\1", line), variables))
        except ValueError as error:
            raise RecipeError(f"not a command line: {error}", where=str(path)) from error
        while tokens and re.fullmatch(r"(export|\w+\+?=.*)", tokens[0], re.S):
            name, equals, value = tokens.pop(0).partition("=")
            if equals and "$(" not in value and name not in unsure:
                variables[name] = value
        program, launcher, rest = _program(tokens)
        if program or (rest and any(token.startswith("--") for token in rest)):
            found = _with_file(path, program, launcher, rest)
            found.launcher["env"] = {**variables}
            yield found


def _unsure(text: str) -> set[str]:
    """Variables that only running it sets: in a branch or a loop, or added to."""
    blocks = r"^\s*(?:if|for|while|until|case)\b.*?\b(?:fi|done|esac)\b|(?:&&|\|\|).*?$|^[ \t].*?$"
    inside = " ".join(re.findall(blocks, text, re.S | re.M))
    named = re.findall(r"(?<![\w-])(\w+)\+?=|\bfor\s+(\w+)", inside)
    return {*re.findall(r"(?<![\w-])(\w+)\+=", text), *(a or b for a, b in named)}


def _lines(text: str) -> list[str]:
    """Logical lines; one that ends in a backslash goes on in the next."""
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.M)
    return [line for line in re.sub(r"\\\s*\n", " ", text).split("\n") if line.strip()]


def _filled(line: str, variables: Mapping[str, str]) -> str:
    """A line with the variables that the file sets, and its divisions."""

    def value(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[2], match[3] or match[0])

    line = re.sub(r"\$(?:(\w+)|\{(\w+)(?::-([^}]*))?\})", value, line)
    divided = r"\$\(\(?\s*(?:expr\s+)?(\d+(?:\s*/\s*\d+)+)\s*\)?\)"

    def divide(match: re.Match[str]) -> str:
        first, *rest = map(int, match[1].split("/"))
        return str(functools.reduce(lambda whole, part: whole // max(part, 1), rest, first))

    return re.sub(divided, divide, line)


def _program(tokens: list[str]) -> tuple[str, list[str], list[str]]:
    """The program with its subcommand, what its launcher is given, and its own arguments."""
    for place, token in enumerate(tokens):
        name = token.rpartition("/")[2]
        if name in _TOOLS and place + 1 < len(tokens) and not tokens[place + 1].startswith("-"):
            return f"{name} {tokens[place + 1]}", tokens[:place], tokens[place + 2 :]
        is_code = name.endswith((".py", "train_ft.py")) and "=" not in name
        if is_code and any(each.rpartition("/")[2] in _RUNNERS for each in tokens[:place]):
            own = name if token.startswith("http") else token
            return own, tokens[:place], tokens[place + 1 :]
    module = tokens.index("-m") if "-m" in tokens[:-1] else None
    if module is not None and tokens[0].rpartition("/")[2] in _RUNNERS:
        return tokens[module + 1], tokens[:module], tokens[module + 2 :]
    return "", [], tokens if tokens and tokens[0].startswith("--") else []


def _with_file(path: Path, program: str, launcher: list[str], arguments: list[str]) -> Theirs:
    values, unclear = _options(arguments, path)
    options, _ = _options(launcher, path)
    plain = [each for each in arguments if each.endswith((".yaml", ".yml", ".json"))]
    named = values.pop("config", None) or (plain[0] if plain and arguments[0] == plain[0] else None)
    if named is not None:
        file = beside(path, str(named))
        if file is None:
            raise RecipeError(
                f"the command reads {named}, and there is no such file",
                where=str(path),
                fix="put it where the command says, or give that file",
            )
        values = {**read_theirs(file).values, **values}
    return Theirs(path, values, program, options, unclear)


def beside(path: Path, name: str) -> Path | None:
    """A file that another one names: from here, or from its folder or one above it."""
    places = [Path(name), *(folder / name for folder in path.absolute().parents)]
    return next((place for place in places if place.is_file()), None)


def _options(tokens: list[str], path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    values, unclear = dict[str, Any](), dict[str, str]()
    key = None
    for token in tokens:
        if re.match(r"--?[a-zA-Z]", token):
            name, equals, value = token.lstrip("-").partition("=")
            key = name.replace("-", "_")
            values[key] = _scalar(value, path) if equals else True
            key = None if equals else key
        elif key is None and (found := re.fullmatch(r"([a-z][\w.]*)=(.*)", token, re.S)):
            values[found[1]] = _scalar(found[2], path)  # behind LLaMA-Factory's file
        elif token in (">", ">>", "2>&1", "|", "&", "&&", ";"):
            break
        elif re.match(r"\$\{?[@*]", token):
            continue  # what the file itself is started with
        elif token.startswith("$") and (key is None or values[key] is not True):
            unclear["options"] = token
        elif key is not None:
            held = [] if values[key] is True else values[key]
            held = [*(held if isinstance(held, list) else [held]), _scalar(token, path)]
            values[key] = held if len(held) > 1 else held[0]
    for name in [key for key, value in values.items() if "$" in str(value)]:
        unclear[name] = str(values.pop(name))
    return values, unclear


def _scalar(token: str, path: Path) -> Any:
    with contextlib.suppress(RecipeError):
        return parse_value(token, str(path))
    return token
