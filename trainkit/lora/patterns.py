"""Patterns of adapters that came from outside: none may take for ever."""

import json
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any

_SECONDS = 1
"""Of a processor: those of sane adapters take a thousandth of it."""

_COMPARE = (
    "import json, re, sys\n"
    "patterns, names = json.load(sys.stdin)\n"
    "for pattern in patterns:\n"
    "    for name in names:\n"
    "        re.fullmatch(pattern, name)\n"
)


def endless_pattern(config: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """The first key of an adapter's configuration whose pattern does not come to an end.

    peft compares it with every name of the model, where nothing can stop it; here another process
    tries it first.

    Args:
        config: as adapter_config.json has it.
        names: of the model's modules.
    """
    found = []
    for key in ("target_modules", "exclude_modules", "layers_pattern"):
        found.append((key, [config.get(key)]))
    for key in ("rank_pattern", "alpha_pattern"):
        found.append((key, list(config.get(key) or {})))
    known = [*names]
    for key, patterns in found:
        repeating = [each for each in patterns if isinstance(each, str) and _repeats(each)]
        if repeating and not _ends(repeating, known):
            return key
    return None


def _repeats(pattern: str) -> bool:
    """Whether it repeats something twice: else its time is bounded by the name's length."""
    return len(re.findall(r"[*+{]", pattern)) > 1


def _ends(patterns: list[str], names: list[str]) -> bool:
    done = subprocess.run(
        [sys.executable, "-I", "-c", _COMPARE],
        input=json.dumps([patterns, names]),
        text=True,
        capture_output=True,
        check=False,
        preexec_fn=_limit,
    )
    return done.returncode not in (-signal.SIGXCPU, -signal.SIGKILL)


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS + 1))
