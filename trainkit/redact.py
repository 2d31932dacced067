"""Keep secrets out of everything that is written or shown.

A value is secret when its name says so (``HF_TOKEN``, ``hubToken``, ``api_key``), when it has the
shape of a well-known credential (``hf_...``, a private key, a header), when it is the password part
of a URL, or when it equals the value of an environment variable with a secret name, wherever it
turns up.
"""

import functools
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

REDACTED = "<redacted>"

_SECRET_WORD = re.compile(
    r"secrets?|passw(?:or)?d|passphrase|credentials?|authorization|jwt|cookie"
    r"|(?:api|access|secret|private|account)keys?|(?:auth|access|api|refresh|id|hub|hf)token"
)
_KEY_OWNER = re.compile(
    r"api|access|private|secret|account|auth|encryption|signing|ssh|master|license"
)
_PASS_OWNER = re.compile(r"db|smtp|mail|email|ftp|http|proxy|user|admin|root|mysql|redis|pg|my")
# "token" is ambiguous in this field: eos_token and pad_token name vocabulary entries. These words
# before it mark the harmless kind.
_VOCABULARY_WORD = re.compile(
    r"[ebu]os|pad|unk|sep|cls|mask|image|video|audio|eot|eom|eoc|bot|turn|start|end|stop|special"
    r"|decoder|per|next|last|first|max|min|num|new|extra|add|is|text|think|chat|vision|boi|eoi"
    r"|prompt|system|user|assistant|trained|a|an|the|each|every|this"
)

# Shapes that the services publish, so that leaked ones are found; the length floors avoid words.
_SHAPES = (  # none is shorter than 15 characters, as most words are
    # AI and its trackers
    r"hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}|sk-(?=[\w-]{0,80}[0-9])[\w-]{20,}|gsk_\w{30,}"
    r"|r8_\w{30,}|xai-\w{40,}|pplx-\w{32,}|nvapi-[\w-]{30,}|lsv2_(?:pt|sk)_\w{20,}|pcsk_\w{20,}"
    r"|wandb_v1_\w{16,}|eyJhcGlf[\w+/=-]{20,}|jina_\w{40,}|fw_\w{20,}|tgp_v1_[\w-]{20,}"
    r"|rpa_[A-Z0-9]{40,}|tvly-[\w-]{24,}|e2b_[a-f0-9]{40}|KGAT_[a-f0-9]{32}|csk-[a-z0-9]{40,}"
    r"|sk_[a-f0-9]{48}|vck_\w{50,}",
    # Clouds
    r"(?:AKIA|ASIA|ABIA|ACCA|A3T[A-Z0-9])[A-Z0-9]{16}|AIza[\w-]{35}|ya29\.[\w-]{16,}"
    r"|GOCSPX-[\w-]{20,}|1//0[\w-]{20,}|LTAI[A-Za-z0-9]{16,}|AKID[A-Za-z0-9]{32}"
    r"|do[opr]_v1_[a-f0-9]{64}|dapi[0-9a-f]{32}(?:-\d)?|hv[sb]\.[\w-]{20,}|dp\.\w{2,8}\.\w{40,}"
    r"|[\w~.]{3}[0-9]Q~[\w~.-]{31,34}|[A-Za-z0-9]{14}\.atlasv1\.[\w=-]{60,}|pul-[a-f0-9]{40}"
    r"|tskey-[a-z]+-[\w-]{10,}|pscale_[a-z]+_[\w.=-]{30,}|glsa_\w{30,}|glc_[\w+/=]{32,}"
    r"|sbp_[a-f0-9]{40}|sb_secret_[\w-]{20,}|ops_eyJ[\w+/=-]{60,}|AGE-SECRET-KEY-1[0-9A-Z]{50,}"
    r"|ABSK[\w+/]{100,}|bedrock-api-key-[\w+/=-]{20,}|[A-Za-z0-9]{52}JQQJ99[A-Za-z0-9]{26}"
    r"|4b1d[A-Za-z0-9]{38}(?!\w)|v1\.0-[a-f0-9]{24}-[a-f0-9]{146}|eyJrIjoi[\w+/=]{60,}"
    r"|dt0c01\.[A-Z0-9a-z]{24}\.[A-Z0-9a-z]{64}|fm(?:1[ar]|2)_[\w+/=-]{40,}|fo1_[\w-]{40,}"
    r"|s\.(?=[A-Za-z]{0,23}[0-9])[A-Za-z0-9]{24}(?![\w.])|sha256~[\w-]{43}|HRKU-AA[\w-]{58}"
    r"|A3-[A-Z0-9]{6}(?:-[A-Z0-9]{11}|-[A-Z0-9]{6}-[A-Z0-9]{5})(?:-[A-Z0-9]{5}){3}"
    r"|nfp_\w{36}|rnd_\w{28}|t1\.[\w-]+={0,2}\.[\w-]{86}|AQVN[\w-]{35,}",
    # Code and packages
    r"gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{50,}"
    r"|gl(?:pat|dt|rt|cbt|ptt|ft|imt|agent|oas|soat|ffct)-[\w.-]{16,}|dckr_(?:pat|oat)_[\w-]{20,}"
    r"|rubygems_[a-f0-9]{48}|CLOJARS_\w{60}|ATATT3[\w=-]{60,}|ATBB\w{24,}|AKCp\w{60,}"
    r"|sq[pua]_[a-f0-9]{40}|sntry[su]_[\w+/=-]{40,}|PMAK-[\w-]{40,}|NR(?:AK|JS|II|RA)-[\w-]{19,}|figd_[\w-]{30,}"
    r"|lin_api_\w{32,}|ntn_\w{40,}|secret_[A-Za-z0-9]{43}|pat[A-Za-z0-9]{14}\.[a-f0-9]{64}"
    r"|GR1348941[\w-]{20,}|_gitlab_session=\w{32}|cmVmd[A-Za-z0-9]{59}|p8e-[a-z0-9]{32}"
    r"|API-[A-Z0-9]{26}(?!\w)|[ps]at\.[\w-]{22}\.\w{24}\.\w{20}|pnu_[A-Za-z0-9]{36}"
    r"|rdme_[a-z0-9]{70}|tk-us-[\w-]{48}|sm_[aps]at_[A-Za-z0-9]{16}|ico-[A-Za-z0-9]{32}"
    r"|sgp_(?:[a-f0-9]{16}_|local_)?[a-fA-F0-9]{40}|s-s4t2(?:ud|af)-[a-f0-9]{64}"
    r"|[A-Za-z0-9]{6}_[A-Za-z0-9]{29}_mmk|dnkey-[\w=-]{60,}|fio-u-[\w=-]{60,}"
    r"|(?:scauth|sc|ext|authress)_\w{5,30}\.\w{4,6}\.acc[_-][\w-]{10,32}\.[\w+/=-]{30,}",
    # Messages and money
    r"xox[a-z](?:\.xox[a-z])?-[\w-]{10,}|xapp-\d-[\w-]{10,}|SK[0-9a-fA-F]{32}|key-[0-9a-f]{32}"
    r"|SG\.[\w=.-]{60,}|[0-9a-f]{32}-us\d{1,2}|[0-9]{5,16}:A[\w-]{34}|xkeysib-[\w-]{64,}"
    r"|(?:sk|rk|pk)_(?:live|test|prod)_\w{10,}|whsec_[\w+/=]{20,}|sq0[a-z]{3}-[\w-]{22,}"
    r"|EAAA[\w-]{22,}|EAA[A-Za-z0-9]{100,}|shp(?:at|ca|pa|ss)_[a-fA-F0-9]{32}|sl\.[\w=-]{100,}"
    r"|[MNO][\w-]{23,25}\.[\w-]{6}\.[\w-]{27,}|shippo_(?:live|test)_[a-fA-F0-9]{40}"
    r"|duffel_(?:live|test)_[\w=-]{43}|EZ[AT]K[A-Za-z0-9]{54}|FLWSECK(?:_TEST)?-\w{12,}"
    r"|\d{15,16}(?:\||%7C)[\w-]{27,}|[ps]k\.[\w-]{60,}\.[\w-]{22}|tfp_[\w.=-]{59}"
    r"|access-(?:sandbox|development|production)-[0-9a-f-]{36}|A{22}[\w%]{80,}",
    # JSON web tokens, and encoded ones
    r"(?<!-)eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?|ey\w{17,}\.ey[\w-]{17,}\.[\w-]*"
    r"|ZXlK[\w+/-]{80,}",
)
_SECRET_SHAPE = re.compile(rf"(?<![A-Za-z0-9_])(?=\S{{15}})(?:{'|'.join(_SHAPES)})")
_PRIVATE_KEY = re.compile(
    r"-----BEGIN (?P<kind>[A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?)-----"
    r".*?(?:-----END (?P=kind)-----|\Z)|(?<=Private-Lines: )\d+(?:\s+[A-Za-z0-9+/=]{8,})+",
    re.DOTALL,
)
_WEBHOOK = re.compile(
    r"(?P<before>hooks\.slack\.com/(?:services|workflows|triggers)/|discord(?:app)?\.com/api/webhooks/"
    r"|\.webhook\.office\.com/webhookb2/|oapi\.dingtalk\.com/robot/send\?access_token="
    r"|open\.(?:feishu|larksuite)\.(?:cn|com)/open-apis/bot/v2/hook/)[^\s\"'<>]+"
)
_QUOTE = r"(?:\\?[\"']|&quot;|&#x?\d+;)"
_HEADER = re.compile(
    rf"(?i)(?P<before>\b(?:proxy-)?authorization{_QUOTE}?[ \t]*[:=][ \t]*{_QUOTE}?"
    r"(?:basic|bearer|token|digest|apikey|negotiate|aws4-hmac-sha256)[ \t]+"
    rf"|\b(?:set-)?cookie{_QUOTE}?:[ \t]*{_QUOTE}?)[^\r\n\"'&\\]{{3,}}"
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
    r"(?P<sign>:[ \t]*[A-Za-z][\w.\[\]| ]{0,40}[ \t]=(?!=)|:=|=>|=(?!=)|:(?!:))[ \t]*)"
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
_NOT_VALUES = frozenset({"null", "none", "true", "false", "str", "optional", REDACTED})
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
    if last in ("pwd", "pass"):
        return bool(_PASS_OWNER.fullmatch(before))
    return any(_SECRET_WORD.fullmatch(word) for word in words) or words == ["", "auth"]


def secret_values(environ: Mapping[str, str] | None = None) -> list[str]:
    """Values of the environment variables with secret names, longest first."""
    variables = os.environ if environ is None else environ
    # Names first: to read a value of os.environ takes longer than to judge its name.
    values = {variables[name] for name in variables if is_secret_name(name)}
    return sorted((v for v in values if len(v) >= _SHORTEST_SECRET), key=len, reverse=True)


def redact_text(text: str, environ: Mapping[str, str] | None = None) -> str:
    return _redact_text(text, secret_values(environ))


def _redact_text(text: str, secrets: Sequence[str]) -> str:
    for value in secrets:
        text = text.replace(value, REDACTED)
    text = _PRIVATE_KEY.sub(REDACTED, text)
    text = _HEADER.sub(_keep_before, text)
    text = _SECRET_SHAPE.sub(REDACTED, text)
    for pattern in (_WEBHOOK, _SCHEME, _QUERY_SECRET):
        text = pattern.sub(_keep_before, text)
    text = _URL_CREDENTIALS.sub(lambda match: f"{match['scheme']}{REDACTED}@", text)
    parts, done, place = list[str](), 0, 0
    while name := _NAME.search(text, place):
        place = name.end()
        is_secret = is_secret_name(name["option"] or name["name"])
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
        return {
            key: _redact(item, secrets, is_secret_name(str(key))) for key, item in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_redact(item, secrets, is_secret) for item in value]
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
