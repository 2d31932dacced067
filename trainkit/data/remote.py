"""Images on a network, fetched where a recipe says so: each once, into a folder that stays."""

import hashlib
import os
import string
import time
from http.client import HTTPException, InvalidURL
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

from trainkit.data.messages import RowError
from trainkit.errors import DataError

SCHEMES = ("http://", "https://")
_SECONDS, _LONGEST = 30, 300
"""That a server may be silent, and of one image in all: it may send a byte now and then."""
_TRIES = 3
_NEVER = frozenset(range(400, 500)) - {408, 425, 429}  # it is too late, too early, too often
_BLOCK = 1 << 20
_KEPT = string.punctuation  # the rest of a URL is written as its bytes


def fetched(url: str, folder: Path, max_bytes: int) -> Path:
    """The file of an image, named by its URL; fetched where it is not there yet.

    Raises:
        RowError: there is none for us, or it is too large.
        DataError: it cannot be fetched now.
    """
    path = folder / hashlib.sha256(url.encode()).hexdigest()[:40]
    if path.exists():
        return path
    for left in reversed(range(_TRIES)):
        try:
            data = _answer(url, max_bytes)
            break
        except (OSError, ValueError, HTTPException) as error:
            gone = isinstance(error, HTTPError) and error.code in _NEVER
            if gone or isinstance(error, ValueError | InvalidURL):
                raise RowError("image_remote", f"{shown(url)}: {error}") from error
            if not left:
                raise DataError(
                    f"{shown(url)} cannot be fetched: {error}",
                    where="data.images.fetch",
                    fix=f"start again (what was fetched stays in {folder}), or take its row out",
                ) from error
            time.sleep(2.0 ** (_TRIES - left) - 1)
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_bytes(data)
    part.replace(path)  # whole, or not there: other processes fetch, too
    return path


def _answer(url: str, max_bytes: int) -> bytes:
    ends, data = time.monotonic() + _LONGEST, bytearray()
    request = Request(quote(url, safe=_KEPT), headers={"User-Agent": "trainkit"})
    with urlopen(request, timeout=_SECONDS) as answer:
        while block := answer.read1(_BLOCK):
            data += block
            if len(data) > max_bytes:
                what = f"{shown(url)} has more than {max_bytes / 2**20:.0f} MiB"
                raise RowError("image_too_large", what)
            if time.monotonic() > ends:
                raise TimeoutError(f"no end after {_LONGEST} seconds")
        announced = answer.headers["Content-Length"]
    if announced is not None and int(announced) != len(data):
        raise OSError(f"{len(data)} bytes came of {announced}")
    return bytes(data)


def shown(url: str) -> str:
    """Without what follows a question mark, which may be a signature."""
    return url.partition("?")[0][:200]
