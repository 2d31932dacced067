"""Patterns of adapters that came from outside: none may take for ever."""

import json
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainkit.errors import CheckpointError

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


_LONG = 500
"""Characters of a name from which on a single repetition, tried from each of them, takes long."""


def refuse_endless(config: Mapping[str, Any], names: Iterable[str], where: Path) -> None:
    """Every reader of an adapter that compares its patterns with names calls this first.

    Args:
        config: as adapter_config.json has it.
        names: of the modules it will be compared with.
        where: the file.

    Raises:
        CheckpointError: a pattern does not come to an end.
    """
    key = endless_pattern(config, names)
    if key is not None:
        raise CheckpointError(
            f"the pattern of {key} takes for ever to compare with the model's names",
            where=str(where),
            fix="write the names themselves there: [q_proj, v_proj]",
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
        patterns = config.get(key)
        found.append((key, list(patterns) if isinstance(patterns, dict) else []))
    known = [*names]
    most = 1 if max(map(len, known), default=0) < _LONG else 0
    for key, patterns in found:
        texts = [each for each in patterns if isinstance(each, str)]
        repeating = [each for each in texts if len(re.findall(r"[*+{]", each)) > most]
        if repeating and not _ends(repeating, known):
            return key
    return None


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
