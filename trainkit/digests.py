"""Digests of files, remembered for as long as the files provably did not change."""

import json
import os
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

_BLOCK_BYTES = 8 << 20
_SETTLED_SECONDS = 2.0
"""A file must be so old when it is hashed: every later write then moves its change time."""


def digest_of(path: Path, new: Callable[[], Any]) -> str:
    """The digest of a file's bytes by a hash such as ``hashlib.sha256``."""
    digest = new()
    with path.open("rb", buffering=0) as stream:
        size = os.fstat(stream.fileno()).st_size  # to clear more takes longer than most files
        block = memoryview(bytearray(min(size, _BLOCK_BYTES) or _BLOCK_BYTES))
        while size := stream.readinto(block):
            digest.update(block[:size])
    return str(digest.hexdigest())


def remembered_digest(path: Path, new: Callable[[], Any], memo: Path) -> str:
    """The same; one that is as it was at an earlier call, by ``memo``, is not read again."""
    path = path.resolve()  # a link of the hub's cache
    state, now = _state(path), time.time_ns()
    kept = memo / f"{xxhash.xxh3_128_hexdigest(os.fsencode(path))}.json"
    with suppress(OSError, ValueError, LookupError, TypeError):
        known = json.loads(kept.read_text(encoding="utf-8"))
        if known["state"] == state and isinstance(known["digest"], str):
            return str(known["digest"])
    found = digest_of(path, new)
    if now - max(state[1:3]) > _SETTLED_SECONDS * 1e9 and _state(path) == state:
        with suppress(OSError):  # no room for a cache is no reason to stop
            memo.mkdir(parents=True, exist_ok=True)
            written = kept.with_suffix(f".{uuid.uuid4().hex}.tmp")
            written.write_text(json.dumps({"state": state, "digest": found}), encoding="utf-8")
            written.replace(kept)
    return found


def _state(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
