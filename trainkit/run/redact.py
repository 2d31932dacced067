"""Keep secrets out of everything a run writes.

A value is secret when its name says so (``HF_TOKEN``, ``hub_token``, ``api_key``), when it has the
shape of a well-known credential (``hf_...``), when it is the password part of a URL, or when it
equals the value of an environment variable with a secret name, wherever it turns up.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

REDACTED = "<redacted>"

_SECRET_WORD = re.compile(r"secrets?|passw(?:or)?d|passphrase|credentials?|authorization")
_KEY_OWNER = re.compile(r"api|access|private|secret|account|auth|encryption|signing|ssh")
# "token" is ambiguous in this field: eos_token and pad_token name vocabulary entries. These words
# before it mark the harmless kind.
_VOCABULARY_WORD = re.compile(
    r"[ebu]os|pad|unk|sep|cls|mask|image|video|audio|eot|turn|start|end|special|decoder|per"
)

# Prefix shapes published by the services themselves; the length floor avoids ordinary words.
_SECRET_SHAPE = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}"
    r"|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[\w-]{20,}|AKIA[0-9A-Z]{16}|xox[abprs]-[\w-]{10,}"
    r"|wandb_v1_\w{16,})|(?<=[Bb]earer )[\w.\-]{16,}"
)
_URL_CREDENTIALS = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.\-]*://)[^\s/@:'\"]*(?::[^\s/@'\"]*)?@")
_QUERY_SECRET = re.compile(
    r"(?i)(?P<name>[?&](?:[\w.\-]*(?:token|key|secret|signature|password|sig))=)[^&\s'\"]+"
)
# "name: value", "name=value" and JSON's "name": "value" inside running text, and "--name value".
_ASSIGNMENT = re.compile(
    r"""(?P<before>(?:(?P<option>--[A-Za-z_][\w.\-]*)[ \t]+"""
    r"""|(?P<name>[A-Za-z_][\w.\-]*)["']?[ \t]*[:=][ \t]*)["']?)"""
    r"""(?P<value>[^\s"',;}\]#:=]{3,})"""
)

# Shorter values ("1", "true", "none") would blank out innocent text.
_SHORTEST_SECRET = 6
_NOT_VALUES = frozenset({"null", "None", "none", "true", "false", "True", "False", REDACTED})
_OPENS_A_KEY = re.compile(r"(?:^|\n|[{,])[ \t]*[\"']?$")


def is_secret_name(name: str) -> bool:
    """Whether a variable, key or option of this name holds a secret: ``hub_token``, ``API_KEY``."""
    words = re.split(r"[_\-.]+", name.lstrip("-").lower())
    before = words[-2] if len(words) > 1 else ""
    if words[-1] == "token":
        return not _VOCABULARY_WORD.fullmatch(before)
    if words[-1] == "key":
        # Every *_KEY of an environment; in recipes, sort_key and text_key are innocent.
        return bool(_KEY_OWNER.fullmatch(before)) or (bool(before) and name.isupper())
    return any(_SECRET_WORD.fullmatch(word) for word in words)


def secret_values(environ: Mapping[str, str] | None = None) -> list[str]:
    """Values of the environment variables with secret names, longest first."""
    variables = os.environ if environ is None else environ
    values = {v for k, v in variables.items() if is_secret_name(k) and len(v) >= _SHORTEST_SECRET}
    return sorted(values, key=len, reverse=True)


def redact_text(text: str, environ: Mapping[str, str] | None = None) -> str:
    """Return ``text`` with every secret replaced by ``<redacted>``."""
    return _redact_text(text, secret_values(environ))


def _redact_text(text: str, secrets: Sequence[str]) -> str:
    for value in secrets:
        text = text.replace(value, REDACTED)
    text = _SECRET_SHAPE.sub(REDACTED, text)
    text = _URL_CREDENTIALS.sub(lambda m: f"{m['scheme']}{REDACTED}@", text)
    text = _QUERY_SECRET.sub(lambda m: m["name"] + REDACTED, text)
    return _ASSIGNMENT.sub(_redact_assignment, text)


def _redact_assignment(match: re.Match[str]) -> str:
    name = match["option"] or match["name"]
    if not is_secret_name(name) or match["value"] in _NOT_VALUES:
        return match[0]
    if name == "token" and not _OPENS_A_KEY.search(match.string, 0, match.start()):
        return match[0]  # prose: "the end-of-turn token: <|im_end|>"
    return match["before"] + REDACTED


def redact(value: Any, environ: Mapping[str, str] | None = None) -> Any:
    """Redact a JSON-like value: mappings by key name, strings by content, recursively."""
    return _redact(value, secret_values(environ))


def _redact(value: Any, secrets: Sequence[str]) -> Any:
    if isinstance(value, str):
        return _redact_text(value, secrets)
    if isinstance(value, Mapping):
        return {
            key: REDACTED
            if isinstance(item, str) and item and is_secret_name(str(key))
            else _redact(item, secrets)
            for key, item in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_redact(item, secrets) for item in value]
    return value


def redact_argv(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> list[str]:
    """Redact a command line: ``--hub-token X``, ``training.hub_token=X``, URLs, known values."""
    redacted: list[str] = []
    hide_next = False
    for argument in argv:
        name, equals, _ = argument.partition("=")
        if hide_next and not argument.startswith("-"):
            redacted.append(REDACTED)
        elif equals and is_secret_name(name):
            redacted.append(f"{name}={REDACTED}")
        else:
            redacted.append(redact_text(argument, environ))
        hide_next = argument.startswith("-") and not equals and is_secret_name(argument)
    return redacted
