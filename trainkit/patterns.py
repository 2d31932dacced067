"""Patterns of recipes and adapters, and sizes that came from outside: none may take for ever."""

import json
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainkit.errors import CheckpointError, TrainkitError
from trainkit.options.model import NOT_TAKEN

_SECONDS = 1
"""Of a processor: those of sane adapters take a thousandth of it."""

_COMPARE = (
    "import json, re, sys\n"
    "patterns, names = json.load(sys.stdin)\n"
    "for pattern in patterns:\n"
    "    for name in names:\n"
    "        re.fullmatch(pattern, name)\n"
    "        re.match(rf'(.*\\.)?({pattern})$', name)\n"
)

_HIGHEST_RANK = 16_384
_HIGHEST_ALPHA = 1_000_000
_FEW_PATTERNS, _LONGEST = 512, 200_000
"""Entries that any model may be given, and characters of all of them together."""


def ends_in(name: str, ends: Iterable[str]) -> bool:
    """Whether a dotted name is one of these, or its last parts are."""
    return any(f".{name}".endswith(f".{end}") for end in ends)


def has_part(name: str, parts: Iterable[str]) -> bool:
    """Whether a dotted name has one of these in it, between dots."""
    return any(f".{part}." in f".{name}." for part in parts)


def refuse_variants(
    config: Mapping[str, Any], where: Path | str, kind: type[TrainkitError] = CheckpointError
) -> None:
    """Every reader of an adapter calls this, or `refuse_endless`."""
    for key in ("layer_replication", "megatron_config", "arrow_config"):
        if value := config.get(key):
            raise kind(
                f"{key}: {json.dumps(value, default=str)[:40]} is not taken: {NOT_TAKEN[key]}",
                where=str(where),
                fix="take an adapter that was trained without it",
            )


def refuse_endless(
    config: Mapping[str, Any],
    names: Iterable[str],
    where: Path | str,
    kind: type[TrainkitError] = CheckpointError,
) -> None:
    """Every reader of a recipe's or an adapter's patterns calls this before it compares them.

    Python and peft compare them with every name of the model, where nothing can stop them; here
    another process tries it first.
    """
    known = [*names]
    _refuse_sizes(config, len(known), where, kind)
    layers = config.get("layers_pattern")
    _refuse_pattern(
        "layers_pattern", layers if isinstance(layers, list) else [layers], known, where, kind
    )
    for key in ("target_modules", "exclude_modules"):
        _refuse_pattern(key, [config.get(key)], known, where, kind)
    for key in ("rank_pattern", "alpha_pattern"):
        _refuse_pattern(key, [*(config.get(key) or ())], known, where, kind)


def _refuse_pattern(
    key: str, patterns: list[Any], names: list[str], where: Path | str, kind: type[TrainkitError]
) -> None:
    for each in patterns:
        try:
            re.compile(each if isinstance(each, str) else "")
        except re.error as error:
            raise kind(
                f"the pattern of {key} ({each:.40}) is no regular expression: {error}",
                where=str(where),
                fix="correct it, or write the names themselves there: [q_proj, v_proj]",
            ) from None
    repeating = [each for each in patterns if isinstance(each, str) and re.search(r"[*+{?]", each)]
    if repeating and not _ends(repeating, names):
        raise kind(
            f"the pattern of {key} ({repeating[0]:.40}) takes for ever to compare with the model's "
            "names",
            where=str(where),
            fix="write the names themselves there: [q_proj, v_proj]",
        )


def _refuse_sizes(
    config: Mapping[str, Any], num_names: int, where: Path | str, kind: type[TrainkitError]
) -> None:
    def refuse(key: str, value: Any, rule: str) -> None:
        shown = value if isinstance(value, str) else json.dumps(value, default=str)
        raise kind(
            f"{key}: {shown[:40]} is not {rule}: no model bears it",
            where=str(where),
            fix=f"write the {key.partition('.')[0]} there that the adapter was made with",
        )

    for key in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(key) or {}, dict):
            refuse(key, config[key], "an object of numbers by name")
    most = max(num_names, _FEW_PATTERNS)
    lists = ("target_modules", "exclude_modules", "modules_to_save", "layers_pattern")
    for key in ("rank_pattern", "alpha_pattern", *lists):
        held = config.get(key)
        if not isinstance(held, str | dict | list | tuple | set | None):
            refuse(key, held, "a name or a list of names")
        if isinstance(held, dict | list | tuple | set) and len(held) > most:
            refuse(
                key, [*held][:3], f"a list of at most {most:,} entries, but one of {len(held):,}"
            )
        if len(held if isinstance(held, str) else "".join(map(str, held or ()))) > _LONGEST:
            refuse(key, str(held), f"at most {_LONGEST:,} characters long")
    for key, rank in _numbers(config, "r", "rank_pattern"):
        least = int(config.get("peft_type", "LORA") == "LORA")
        if type(rank) is not int or not least <= rank <= _HIGHEST_RANK:
            refuse(key, rank, f"a whole number from 1 to {_HIGHEST_RANK:,}")
    for key, alpha in _numbers(config, "lora_alpha", "alpha_pattern"):
        if type(alpha) not in (int, float) or not abs(alpha) <= _HIGHEST_ALPHA:
            refuse(key, alpha, f"a number up to {_HIGHEST_ALPHA:,}")
    refuse_variants(config, where, kind)
    if re.search(r"\d{4,}", str(config.get("init_lora_weights"))):
        refuse("init_lora_weights", config["init_lora_weights"], "at most 999 turns")


def _numbers(config: Mapping[str, Any], key: str, patterns: str) -> list[tuple[str, Any]]:
    of_all = [(key, config[key])] if config.get(key) is not None else []
    return [
        *of_all,
        *((f"{patterns}.{name}", n) for name, n in (config.get(patterns) or {}).items()),
    ]


def _ends(patterns: list[str], names: list[str]) -> bool:
    done = subprocess.run(
        [sys.executable, "-I", "-c", _COMPARE],
        input=json.dumps([patterns, names]),
        text=True,
        capture_output=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS + 1)),
    )
    return done.returncode not in (-signal.SIGXCPU, -signal.SIGKILL)
