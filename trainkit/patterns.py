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

_MOST_LAYERS = 1_000
_HIGHEST_RANK = 16_384


def refuse_endless(
    config: Mapping[str, Any],
    names: Iterable[str],
    where: Path | str,
    kind: type[TrainkitError] = CheckpointError,
) -> None:
    """Every reader of a recipe's or an adapter's patterns calls this before it compares them.

    Python and peft compare them with every name of the model, where nothing can stop them; here
    another process tries it first.

    Args:
        config: as adapter_config.json has it.
        names: of the modules it will be compared with.
        where: the file, or the section.
        kind: of the error.

    Raises:
        TrainkitError: of ``kind``; a pattern does not come to an end, or a size has none.
    """
    _refuse_sizes(config, where, kind)
    known = [*names]
    for key in ("target_modules", "exclude_modules", "layers_pattern"):
        _refuse_pattern(key, [config.get(key)], known, where, kind)
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(key)
        _refuse_pattern(key, [*patterns] if isinstance(patterns, dict) else [], known, where, kind)


def _refuse_pattern(
    key: str, patterns: list[Any], names: list[str], where: Path | str, kind: type[TrainkitError]
) -> None:
    repeating = [each for each in patterns if isinstance(each, str) and re.search(r"[*+{?]", each)]
    if repeating and not _ends(repeating, names):
        raise kind(
            f"the pattern of {key} takes for ever to compare with the model's names",
            where=str(where),
            fix="write the names themselves there: [q_proj, v_proj]",
        )


def _refuse_sizes(config: Mapping[str, Any], where: Path | str, kind: type[TrainkitError]) -> None:
    ranks = config.get("rank_pattern")
    ranks = [config.get("r"), *(ranks.values() if isinstance(ranks, dict) else ())]
    repeated = config.get("layer_replication") or []
    spans = [each for each in repeated if _is_span(each)] if isinstance(repeated, list) else []
    turns = re.search(r"\d{4,}", str(config.get("init_lora_weights")))
    wrong = None
    if any(isinstance(each, int) and each > _HIGHEST_RANK for each in ranks):
        wrong = f"a rank above {_HIGHEST_RANK:,}"
    elif repeated and spans != repeated:
        wrong = "a layer_replication that is no list of [from, to]"
    elif sum(end - start for start, end in spans) > _MOST_LAYERS:
        wrong = f"a layer_replication of more than {_MOST_LAYERS:,} layers"
    elif turns:
        wrong = f"init_lora_weights of {turns[0]:.20} turns"
    if wrong:
        raise kind(f"{wrong}: no model bears it", where=str(where), fix="correct it there")


def _is_span(span: Any) -> bool:
    return (
        isinstance(span, list)
        and [type(each) for each in span] == [int, int]
        and 0 <= span[0] < span[1]
    )


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
