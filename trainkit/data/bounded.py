"""Bounds on what a template takes: templates are programs, and come from outside.

A signal stops a template between two steps of Python. A single step that makes a number of ten
billion digits, or pads a word to that width, would go on for hours or take all memory; it is
refused before it is taken.
"""

import contextlib
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from types import FrameType
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trainkit.errors import DataError

RENDER_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    KeyError,
    IndexError,
    AttributeError,
    RecursionError,
    ArithmeticError,
    MemoryError,
)
"""What a template raises on a row it does not take: its own error, or an untested case."""

SECONDS = 10.0
"""Longer than any conversation takes to render: a thousand turns take about 0.1 s."""


@contextlib.contextmanager
def patience(
    seconds: float | None = None,
    *,
    what: str = "the chat template",
    where: str = "the tokenizer's chat_template, or data.chat_template",
    fix: str = "give one that ends with data.chat_template",
) -> Iterator[None]:
    """Raise a DataError in the body when it takes too long.

    Only in a process's main thread, where signals arrive; elsewhere the body runs as it is.

    Args:
        seconds: by default ``SECONDS``.
        what: the error is about.
        where: it stands.
        fix: what to do about it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    limit = SECONDS if seconds is None else seconds

    def stop(number: int, frame: FrameType | None) -> None:
        raise DataError(
            f"{what} was still rendering one row after {limit:g} s", where=where, fix=fix
        )

    before = signal.signal(signal.SIGALRM, stop)
    # And again after: Jinja takes any error of a constant for one that it should not fold.
    signal.setitimer(signal.ITIMER_REAL, limit, min(limit, 1.0))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


LARGEST = 1 << 25
"""Characters: more than any conversation has."""
LARGEST_LIST = 1 << 20
LARGEST_WIDTH = 10**6
"""Characters that a text is padded to, or items of a batch."""
LARGEST_BITS = 1 << 16
_MOST_NESTED = 1 << 18
"""Things in a list of lists that is made into text; they may be one list, many times."""

_OF_WIDTH = frozenset(
    [
        *("center", "indent", "batch", "slice", "tojson", "round"),
        *("ljust", "rjust", "zfill", "expandtabs"),
    ]
)
_TO_TEXT = frozenset(
    [
        *("tojson", "string", "pprint", "join", "e", "escape", "forceescape", "upper", "lower"),
        *("trim", "title", "capitalize", "replace", "format", "center", "indent", "wordwrap"),
        *("striptags", "urlencode", "truncate", "wordcount", "urlize", "safe"),
    ]
)
_WIDE_FIELD = re.compile(r"\d{7,}")
_FIELD_OF_A_FIELD = re.compile(r"\{[^{}]*\{|%[^a-zA-Z%]*\*")


def _refuse(what: str) -> None:
    raise SecurityError(f"{what}: more than a template may make at once")


def _check_size(size: int, what: str) -> None:
    if size > LARGEST:
        _refuse(f"{what} of {size:.3g} characters" if size.bit_length() < 999 else what)


def _check_widths(widths: Iterable[Any], what: str) -> None:
    if any(isinstance(width, int) and abs(width) > LARGEST_WIDTH for width in widths):
        _refuse(f"{what} of such a width")


def _size(value: Any) -> int:
    """In characters; an item of a list counts as many."""
    if isinstance(value, (str, bytes)):  # first: a template adds little else
        return len(value)
    if not isinstance(value, (list, tuple)):
        return 0
    texts = sum(len(each) for each in value if isinstance(each, str))
    return texts + len(value) * (LARGEST // LARGEST_LIST)


def _check_nested(value: Any) -> Any:
    """Containers that hold one another have a text that may be longer than the universe."""
    left, count = [value], 0
    while left:
        each = left.pop()
        if isinstance(each, Mapping):
            left += each.values()
        elif isinstance(each, (list, tuple)):
            left += each
        count += 1
        if count > _MOST_NESTED:
            _refuse("a list of lists with so many things")
    return value


def _joined(parts: Iterable[str]) -> str:
    """What a template, a macro or a block has printed."""
    size, found = 0, []
    for each in parts:
        size += len(each)
        _check_size(size, "a text")
        found.append(each)
    return "".join(found)


def _check_format(text: str, values: Sequence[Any]) -> None:
    """``%`` and ``format``: widths in the text or, for ``*`` and ``{:{}}``, in the values."""
    if _WIDE_FIELD.search(text):
        _refuse("a format of such a width")
    if _FIELD_OF_A_FIELD.search(text):
        _check_widths(values, "a format")
    num_fields = text.count("%") + text.count("{")
    _check_size(num_fields * max(map(_size, values), default=0), "a text")
    for value in values:
        _check_nested(value)


def _check_replace(text: Any, words: Sequence[Any]) -> None:
    if isinstance(text, str) and len(words) > 1 and all(isinstance(w, str) for w in words[:2]):
        growth = max(len(words[1]) - len(words[0]), 0)
        count = text.count(words[0]) if growth * (len(text) + 1) > LARGEST else 0
        _check_size(len(text) + growth * count, "a text")


def _check_join(between: Any, parts: Any) -> None:
    if isinstance(parts, (list, tuple)):
        _check_nested(parts)
        size = sum(len(each) for each in parts if isinstance(each, str))
        _check_size(size + len(str(between)) * len(parts), "a text")


def _check_operator(operator: str, left: Any, right: Any) -> None:
    numbers = [isinstance(each, int) for each in (left, right)]
    if operator == "+":
        _check_size(_size(left) + _size(right), "a sum")
    elif operator == "%" and isinstance(left, str):
        values = [*right.values()] if isinstance(right, Mapping) else right
        _check_format(left, values if isinstance(values, (list, tuple)) else [values])
    elif operator == "*" and any(numbers) and not all(numbers):
        _check_size(left * _size(right) if numbers[0] else right * _size(left), "a repetition")
    elif operator == "*" and all(numbers):
        if left.bit_length() + right.bit_length() > LARGEST_BITS:
            _refuse("a product of so many digits")
    elif operator == "**" and all(numbers) and left.bit_length() * abs(right) > LARGEST_BITS:
        _refuse("a power of so many digits")


class _Filters(dict[str, Callable[..., Any]]):
    """Those of a template, each behind a look at what it is given."""

    def __setitem__(self, name: str, plain: Callable[..., Any]) -> None:
        bounded = name in _OF_WIDTH | _TO_TEXT
        super().__setitem__(name, _bounded_filter(name, plain) if bounded else plain)


def _bounded_filter(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)  # with the mark that says what Jinja has to give besides
    def bounded(*arguments: Any, **named: Any) -> Any:
        given = [*arguments, *named.values()]
        if name in _OF_WIDTH:
            _check_widths(given[1:], name)
        values = given[1:] if hasattr(plain, "jinja_pass_arg") else given
        if name in _TO_TEXT and values:
            _check_nested(values[0])
        if name == "replace":
            _check_replace(values[0], values[1:])
        elif name == "join":
            _check_join(values[1] if len(values) > 1 else "", values[0])
        elif name == "format":
            _check_format(str(values[0]), values[1:])
        return plain(*arguments, **named)

    return bounded


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which no single step takes long or much memory."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})
    concat = staticmethod(_joined)

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **{"finalize": _check_shown, **named})
        plain, self.filters = self.filters, _Filters()
        for name, each in plain.items():
            self.filters[name] = each

    def _generate(self, source: nodes.Template, *arguments: Any, **named: Any) -> str:
        """Python of a template, whose ``~`` is a bounded join."""
        for each in source.find_all(nodes.Concat):
            parts = nodes.List(each.nodes, lineno=each.lineno)
            each.nodes = [nodes.Filter(parts, "join", [], [], None, None, lineno=each.lineno)]
        return super()._generate(source, *arguments, **named)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """The operator, when its operands are small enough."""
        _check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format`` as the sandbox has it, of bounded width."""
        plain = super().wrap_str_format(value)
        if plain is None:
            return None
        inner = plain

        @wraps(plain)
        def bounded(*arguments: Any, **named: Any) -> str:
            given = [*arguments, *named.values()]
            if arguments and isinstance(arguments[0], Mapping):
                given += arguments[0].values()
            _check_format(value.__self__, given)
            return inner(*arguments, **named)

        return bounded

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A method or function, when it makes no more than it may."""
        text, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(text, str):
            given = [*args, *kwargs.values()]
            if name in _OF_WIDTH:
                _check_widths(given, name)
            elif name == "replace":
                _check_replace(text, given)
            elif name == "join" and given:
                _check_join(text, given[0])
        return super().call(__context, __obj, *args, **kwargs)


def _check_shown(value: Any) -> Any:
    """What ``{{ }}`` shows."""
    return value if isinstance(value, str) else _check_nested(value)


def bound_templates() -> None:
    """From now on, wherever a tokenizer of transformers renders its template."""
    from transformers.utils import chat_template_utils  # rows are read without it

    chat_template_utils.ImmutableSandboxedEnvironment = BoundedEnvironment
