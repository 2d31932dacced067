"""Reading another tool's file: YAML, JSON, a command line, or a Python script that is never run."""

import ast
import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.errors import RecipeError
from trainkit.places import regular
from trainkit.recipe.read.document import parse_value, read_document

_CALLS = {
    "from_pretrained": "model_name",
    "get_peft_model": None,
    "LoraConfig": None,
    "SFTConfig": None,
    "TrainingArguments": None,
    "UnslothTrainingArguments": None,
    "SFTTrainer": None,
    "UnslothTrainer": None,
    "DPOTrainer": None,
    "GRPOTrainer": None,
    "RewardTrainer": None,
    "load_dataset": "dataset_name",
    "get_chat_template": None,
    "train_on_responses_only": None,
}
"""Calls of a script whose arguments matter, and the name of the first one where it has none."""

_OBJECTS = frozenset(
    {"model", "tokenizer", "args", "train_dataset", "eval_dataset", "data_collator", "peft_config"}
    | {"processing_class", "formatting_func", "callbacks", "max_lora_rank"}
)
"""Arguments that hand objects on, and set nothing."""

_LARGEST = 2**20


@dataclass(frozen=True)
class Theirs:
    """What a file says.

    Attributes:
        path: the file.
        values: its keys; of a script the arguments of its calls, and their names, which are true.
        unclear: keys whose value only the script itself could tell.
    """

    path: Path
    values: dict[str, Any]
    unclear: dict[str, str]


def read_theirs(path: Path) -> Theirs:
    """Read a file of another tool.

    Raises:
        RecipeError: it cannot be read, or is none of the four.
    """
    try:
        if path.stat().st_size > _LARGEST:
            raise RecipeError("this is no recipe: it is larger than 1 MiB", where=str(path))
        text = regular(path, RecipeError).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise RecipeError(f"cannot be read: {reason}", where=str(path)) from error
    if path.suffix == ".py" or text.startswith(("#!/usr/bin/env python", "from ", "import ")):
        return _script(path, text)
    if path.suffix == ".json" or text.lstrip().startswith("{"):
        return Theirs(path, _json(path, text), {})
    if path.suffix in (".yaml", ".yml"):
        return Theirs(path, read_document(path).values, {})
    return Theirs(path, _arguments(path, text), {})


def _json(path: Path, text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"not JSON: {error}", where=str(path)) from error
    if not isinstance(values, dict):
        raise RecipeError("a recipe is a mapping of keys", where=str(path))
    return values


def _arguments(path: Path, text: str) -> dict[str, Any]:
    """``--key value`` of a command line; what comes before the program is the launcher's."""
    try:
        tokens = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise RecipeError(f"not a command line: {error}", where=str(path)) from error
    starts = [n for n, token in enumerate(tokens) if token.endswith(".py") or token == "sft"]
    values: dict[str, Any] = {}
    key = None
    for token in tokens[starts[-1] + 1 if starts else 0 :]:
        if token.startswith("--"):
            name, equals, value = token.removeprefix("--").partition("=")
            key = name.replace("-", "_")
            values[key] = parse_value(value, str(path)) if equals else True
            key = None if equals else key
        elif key is not None:
            value = parse_value(token, str(path))
            held = values[key]
            values[key] = value if held is True else [*_listed(held), value]
    if not values:
        raise RecipeError(
            "neither YAML, nor JSON, nor a script, nor a command line with --options",
            where=str(path),
            fix="give the file that the other tool is started with",
        )
    return values


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _script(path: Path, text: str) -> Theirs:
    """The arguments of the calls that set something up; literals, and names of literals."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RecipeError(f"not Python: {error}", where=str(path)) from error
    constants: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = _value(node.value, {})
            if value is not _UNCLEAR:
                constants[node.targets[0].id] = value
    values: dict[str, Any] = {}
    unclear: dict[str, str] = {}
    for name, owner, call in _calls(tree):
        values.setdefault(name, True)
        if owner:
            values.setdefault(owner, True)
        first = _CALLS[name]
        arguments = [(word.arg, word.value) for word in call.keywords if word.arg]
        if first and call.args and "okenizer" not in owner:
            arguments.insert(0, (first, call.args[0]))
        if "okenizer" in owner:
            continue
        for key, node in arguments:
            if key in _OBJECTS or (isinstance(node, ast.Call | ast.Lambda) and key in _OBJECTS):
                continue
            value = _value(node, constants)
            if value is _UNCLEAR:
                unclear[key] = ast.unparse(node)
            else:
                values[key] = value
    return Theirs(path, values, unclear)


_UNCLEAR = object()


def _calls(tree: ast.AST) -> Iterator[tuple[str, str, ast.Call]]:
    """Name, the object it is called on, and the call."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Name) and function.id in _CALLS:
            yield function.id, "", node
        elif isinstance(function, ast.Attribute) and function.attr in _CALLS:
            owner = function.value.id if isinstance(function.value, ast.Name) else ""
            yield function.attr, owner, node


def _value(node: ast.expr, constants: dict[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return constants.get(node.id, _UNCLEAR)
    if isinstance(node, ast.Attribute):  # torch.bfloat16
        is_torch = isinstance(node.value, ast.Name) and node.value.id == "torch"
        return f"torch.{node.attr}" if is_torch else _UNCLEAR
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return _UNCLEAR
