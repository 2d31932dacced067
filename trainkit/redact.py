"""Keep secrets out of everything that is written or shown.

A value is secret when its name says so (``HF_TOKEN``, ``api_key``), when it has the shape of a
credential (``hf_...``, a private key, a header), when a URL, a program, a file or SQL takes it as a
password (``redact.json``), or when an environment variable with a secret name has it.
"""

import functools
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

REDACTED = "<redacted>"

_SECRET_WORD = re.compile(
    r"secrets?|[a-z]*passw(?:or)?d|[a-z]*passphrase|credentials?|authorization|jwt|cookie|sessionid|csrftoken|passcode|kennwort|sshpass|(?:root|admin|bind|user|db)pw"
    r"|(?:api|access|secret|private|account)keys?|(?:auth|access|api|refresh|id|hub|hf)token"
)
_KEY_OWNER = re.compile(
    r"api|access|private|secret|account|auth|encryption|signing|ssh|master|license"
)
_PASS_OWNER = re.compile(
    r"db|smtp|mail|email|ftp|http|proxy|user|admin|root|mysql|redis|pg|my|ssh|become|vault|sudo|bind|svn"
    r"|key|store|cert|login|account|wifi|vpn|rdp|ldap|sql|postgres|mongo|rabbitmq|git|docker"
)
# Before "token" these words mark an entry of a vocabulary: eos_token, pad_token.
_VOCABULARY_WORD = re.compile(
    r"[ebu]os|pad|unk|sep|cls|mask|image|video|audio|eot|eom|eoc|bot|turn|start|end|stop|special"
    r"|decoder|per|next|last|first|max|min|num|new|extra|add|is|text|think|chat|vision|boi|eoi"
    r"|prompt|system|user|assistant|trained|a|an|the|each|every|this"
)

_TABLE = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def _any_of(kind: str) -> str:
    return "|".join(each for group in _TABLE[kind].values() for each in group)


_SECRET_SHAPE = re.compile(rf"(?<![A-Za-z0-9_])(?=\S{{15}})(?:{_any_of('shapes')})")
_PRIVATE_KEY = re.compile(
    r"-----BEGIN (?P<kind>[A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?)-----"
    r".*?(?:-----END (?P=kind)-----|\Z)|(?<=Private-Lines: )\d+(?:\s+[A-Za-z0-9+/=]{8,})+",
    re.DOTALL,
)
_COMMAND = re.compile(
    rf"(?P<before>(?:\b|(?<=\\[nrt]))(?:{_any_of('commands')})"
    r"|<[\w:.-]*(?i:password|passphrase|secret|api[_-]?key)>(?=[^<>\s]+</))(?![$<*{]|%\w)"
    r"(?:\\?'[^'\n]+'|\\?\"[^\"\n]+\"|[^\s\"'\\<|]+)"
)
_QUOTE = r"(?:\\?[\"']|&quot;|&#x?\d+;)"
_PAIR = re.compile(
    rf"(?P<before>\b(?:name|key){_QUOTE}?[ \t]*[:=][ \t]*{_QUOTE}?(?P<pair>[\w.\-:]+){_QUOTE}?"
    rf"(?:[,\s+-]|\\n)+{_QUOTE}?value{_QUOTE}?[ \t]*[:=][ \t]*{_QUOTE}?)[^\s\"'\\<>{{}}$&]+"
)
_WEBHOOK = re.compile(
    r"(?P<before>hooks\.slack\.com/(?:services|workflows|triggers)/|discord(?:app)?\.com/api/webhooks/"
    r"|\.webhook\.office\.com/webhookb2/|oapi\.dingtalk\.com/robot/send\?access_token="
    r"|open\.(?:feishu|larksuite)\.(?:cn|com)/open-apis/bot/v2/hook/)[^\s\"'<>]+"
)
_HEADER = re.compile(
    rf"(?i)(?P<before>(?:\b|(?<=\\[nrt]))(?:(?:proxy-)?authorization{_QUOTE}?"
    rf"[ \t]*[:=][ \t]*{_QUOTE}?"
    r"(?:basic|bearer|token|digest|apikey|negotiate|aws4-hmac-sha256)[ \t]+"
    rf"|(?:set-)?cookie{_QUOTE}?:[ \t]*{_QUOTE}?))[^\r\n\"'&\\]{{3,}}"
)
_SCHEME = re.compile(
    r"(?P<before>\b(?:[Bb]earer|BEARER) )[\w.~+/=\-]{16,}"
    r"|(?P<basic>\b(?:[Bb]asic|BASIC) )(?=[A-Za-z+/]*[0-9=])[A-Za-z0-9+/]{12,}={0,2}"
    r"|(?P<user>(?:^|\s)(?:-u|--user)[ =][\"']?(?!\d+:)[^\s:\"'/]{1,60}:)[^\s\"']+"
)
_URL_CREDENTIALS = re.compile(
    r"(?P<scheme>\b[A-Za-z][A-Za-z0-9+.\-]{1,30}://)[^\s/@:'\"<>]{0,200}(?::[^\s/'\"]{0,500})?@"
)
_QUERY_SECRET = re.compile(
    r"(?i)(?P<name>(?:[?&]|&amp;)(?:[\w.\-]{0,60}(?:token|key|secret|signature|password|sig))=)"
    r"[^&\s'\"\\]+|(?P<pwd>;[ \t]*pwd=)[^;\s'\"]+"
)
# "name: value", "name=value" and JSON's "name": "value" inside running text, with a type between
# them in code, and "--name value"; of other names, the value may hold such a pair itself.
_NAME = re.compile(
    r"(?:(?<![\w.\-\\])|(?<=\\[nrt]))(?:(?P<option>--[A-Za-z_][\w.\-]*)[ \t]+"
    rf"|(?P<name>-{{0,2}}[A-Za-z_][\w.\-]*)(?:{_QUOTE}\])?{_QUOTE}?[ \t]*"
    r"(?P<sign>:[ \t]*[A-Za-z][\w.\[\]| ]{0,40}[ \t]=(?!=)|:=|=>|=(?!=)|:(?!:)|::(?=[ \t]))[ \t]*)"
)
_VALUE = re.compile(
    r"\$?[rRbBuUfF]{0,2}(?:(?P<quote>[\"'])(?P<quoted>(?:\\.|(?!(?P=quote))[^\\\n])+)"
    r"|(?:\\[\"']|&quot;|&#x?\d+;)(?P<escaped>[^\\\"'&\n]+))"
    r"|(?P<value>(?:(?!\\[nrt])[^\s\"',;}\]&]){3,})"
)
# What stands for a secret in code and recipes, and is none.
_IS_CODE = re.compile(
    r"[A-Za-z_][\w.]*[(\[]|(?:self|args|cfg|config|os|env|options|settings)\."
    r"|\$[({A-Za-z_]|<[^>]*>$|\[[A-Z]+$|%\w+%|\*+$"
)

# Shorter values ("1", "true", "none") would blank out innocent text.
_SHORTEST_SECRET = 6
_NOT_VALUES = frozenset({"null", "none", "value", "true", "false", "str", "optional", REDACTED})
_OPENS_A_KEY = re.compile(r"(?:^|\n|[{,(]|\\n)[ \t]*[+-]?[ \t]*(?:\\?[\"']|&quot;)?$")


@functools.lru_cache(4096)  # a run asks for the same keys and variables hundreds of times
def is_secret_name(name: str) -> bool:
    """Whether a variable, key or option of this name holds a secret: ``hub_token``, ``apiKey``."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name.lstrip("-"))
    words = re.split(r"[_\-.]+", snake.lower())
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last == "token":
        return not _VOCABULARY_WORD.fullmatch(before)
    if last in ("key", "keys"):
        # Every *_KEY of an environment; in recipes, sort_key and text_key are innocent.
        return bool(_KEY_OWNER.fullmatch(before)) or (bool(before) and name.isupper())
    if last in ("pwd", "pass", "pw"):
        return bool(_PASS_OWNER.fullmatch(before))
    if last in ("auth", "pat", "sk") and name.isupper():
        return bool(before)
    return any(_SECRET_WORD.fullmatch(word) for word in words) or words == ["", "auth"]


def secret_values(environ: Mapping[str, str] | None = None) -> list[str]:
    """Values of the environment variables with secret names, longest first."""
    variables = os.environ if environ is None else environ
    # Names first: to read a value of os.environ takes longer than to judge its name.
    values = {variables[name] for name in variables if is_secret_name(name)}
    return sorted((v for v in values if len(v) >= _SHORTEST_SECRET), key=len, reverse=True)


def redact_text(text: str, environ: Mapping[str, str] | None = None) -> str:
    return _redact_text(text, secret_values(environ))


def _redact_text(text: str, secrets: Iterable[str]) -> str:
    for value in secrets:
        text = text.replace(value, REDACTED)
    words = text.lower()  # few texts have what these patterns begin with
    if "private" in words:
        text = _PRIVATE_KEY.sub(REDACTED, text)
    if "authorization" in words or "cookie" in words:
        text = _HEADER.sub(_keep_before, text)
    text = _SECRET_SHAPE.sub(REDACTED, text)
    for pattern in (_WEBHOOK, _COMMAND, _SCHEME, _QUERY_SECRET):
        text = pattern.sub(_keep_before, text)
    text = _PAIR.sub(lambda m: _keep_before(m) if is_secret_name(m["pair"]) else m[0], text)
    if "://" in text and "@" in text:
        text = _URL_CREDENTIALS.sub(lambda match: f"{match['scheme']}{REDACTED}@", text)
    parts, done, place = list[str](), 0, 0
    while name := _NAME.search(text, place):
        is_secret = is_secret_name(name["option"] or name["name"])
        place = name.end() if is_secret or name["option"] else name.start("sign")
        if not is_secret or not (given := _VALUE.match(text, place)):
            continue
        place = given.end()
        if not _is_innocent(name, given):
            start, end = given.span(str(given.lastgroup))
            parts += text[done:start], REDACTED
            done = end
    return "".join((*parts, text[done:]))


def _keep_before(match: re.Match[str]) -> str:
    return next(filter(None, match.groups())) + REDACTED


def _is_innocent(named: re.Match[str], given: re.Match[str]) -> bool:
    name, is_bare = named["option"] or named["name"], given.lastgroup == "value"
    value, stem = given[str(given.lastgroup)], re.split(r"[.\-_]", name)[-1].lower()
    if value.rstrip("):").lower() in (*_NOT_VALUES, stem, name.lower()):
        return True
    if _IS_CODE.match(value) if is_bare else re.fullmatch(r"<[^>]*>|\[[A-Z]+\]", value):
        return True
    if name not in ("token", "secret", "secrets"):
        return False
    # Words of prose and of this field too: "the end-of-turn token: <|im_end|>", {"token": "the"}.
    opens = _OPENS_A_KEY.search(named.string, max(0, named.start() - 20), named.start())
    if is_bare and (
        (named["sign"] == ":" and not opens) or (value.isidentifier() and value.islower())
    ):
        return True
    return value.isdecimal() or (named["sign"] == ":" and len(value) < _SHORTEST_SECRET)


def redact(value: Any, environ: Mapping[str, str] | None = None) -> Any:
    """Redact a JSON-like value: mappings by key name, strings by content, recursively."""
    return _redact(value, secret_values(environ))


def _redact(value: Any, secrets: Sequence[str], is_secret: bool = False) -> Any:
    if isinstance(value, str):
        return REDACTED if value and is_secret else _redact_text(value, secrets)
    if isinstance(value, Mapping):
        pair = is_secret_name(str(value.get("name", value.get("key", ""))))
        hidden = {k for k in value if is_secret_name(str(k)) or (pair and k == "value")}
        return {key: _redact(item, secrets, key in hidden) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_redact(item, secrets, is_secret) for item in value]
    return value


def redact_argv(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> list[str]:
    """Redact a command line: ``--hub-token X``, ``training.hub_token=X``, URLs, known values."""
    redacted, secrets = list[str](), secret_values(environ)
    hide_next = False
    for argument in argv:
        name, equals, _ = argument.partition("=")
        if hide_next and not argument.startswith("-"):
            redacted.append(REDACTED)
        elif equals and is_secret_name(name):
            redacted.append(f"{name}={REDACTED}")
        else:
            redacted.append(_redact_text(argument, secrets))
        hide_next = argument.startswith("-") and not equals and is_secret_name(argument)
    return redacted
