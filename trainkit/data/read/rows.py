"""From an undecoded row to what it holds: one way for training, held-out questions, generate."""

import codecs
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from trainkit.data.read.formats import parse_row
from trainkit.data.read.messages import (
    Comparison,
    Conversation,
    ParsedRow,
    RowError,
    TextRow,
    check_text,
)
from trainkit.data.read.reading import RawRow, decode
from trainkit.data.read.row_fields import MEDIA


def decode_row(raw: RawRow) -> Any:
    """The decoded value of a row.

    Raises:
        RowError: it cannot be cut out of its file, is not UTF-8, or is not JSON.
    """
    if raw.payload is None:
        raise RowError(*(raw.problem or ("unreadable", "the row cannot be read")))
    try:
        return decode(raw.payload)
    except UnicodeDecodeError as error:
        detail = f"byte {error.start} of the row is not UTF-8"
        begins = raw.payload[:2] if isinstance(raw.payload, bytes) else b""
        if begins in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            detail += "; it begins as UTF-16 or UTF-32 do: iconv -f UTF-16 -t UTF-8 converts it"
        raise RowError("not_utf8", detail) from error
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")  # as some of Python's sentences end
        place = f"{what} at column {error.colno}"
        if error.lineno > 1:
            place += f", {error.lineno - 1} lines further"
        if isinstance(raw.payload, bytes) and b"\0" in raw.payload:
            place += (
                "; it holds NUL bytes, as UTF-16 does (iconv -f UTF-16LE -t UTF-8 converts it), "
            )
            place += "or a file whose writer crashed"
        raise RowError("bad_json", place) from error
    except ValueError as error:
        raise RowError("bad_json", str(error)) from error
    except RecursionError as error:
        raise RowError("nested_too_deep", "the JSON nests too deep to be read") from error


def read_row(row: Any, name: str, columns: Mapping[str, str] | None = None) -> ParsedRow:
    """Parse a decoded row and check its plain text; conversations are checked by ``validate``.

    Args:
        row: the decoded value.
        name: a name of ``FORMATS``, or ``auto``.
        columns: our column name -> the row's column name.

    Raises:
        RowError: the row does not fit, or holds text that no tokenizer takes.
    """
    parsed = parse_row(row, name, columns)
    if isinstance(parsed, TextRow):
        check_text(parsed.prompt, "'prompt'")
        check_text(parsed.text, "the text")
    said_so = isinstance(row, Mapping) and any(row.get(key) == [] for key in MEDIA)
    for place, text in () if said_so else _texts(parsed):
        found = PLACEHOLDER.search(text) and PLACEHOLDER.search(CODE.sub("", text))
        if found and f"</{found[1]}>" not in text:
            raise RowError(
                "media_placeholder",
                f"{place} has {found[0]}, which stands for what is not text, and only text is "
                "trained; where it is meant as text, write it in backticks, or give the row "
                f'"{found[1]}s": []',
            )
    return parsed


PLACEHOLDER = re.compile(r"<(image|video|audio)>")
CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)


def _texts(parsed: ParsedRow) -> Iterator[tuple[str, str]]:
    """The texts of a row, with what to call them."""
    if isinstance(parsed, TextRow):
        yield from (("the prompt", parsed.prompt), ("the text", parsed.text))
    elif isinstance(parsed, Comparison):
        for conversation in parsed.conversations:
            yield from _texts(conversation)
    elif isinstance(parsed, Conversation):
        for number, message in enumerate(parsed.messages, 1):
            yield f"turn {number} ({message.role})", message.content
