"""Rows that were dropped, to be looked at: where they are, why, and what they say."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainkit.data.build.datasets import PreparedData
from trainkit.data.build.ledger import read_ledger
from trainkit.data.build.source import LEDGER
from trainkit.data.read.reading import read_rows

PER_REASON = 3
"""So many rows are shown for each reason."""

EXCERPT = 400
"""So many characters of a row are shown."""


@dataclass(frozen=True)
class DroppedRow:
    """One row that is not used.

    Attributes:
        id: ``file:line``.
        source: its source's name.
        reason: a stable code.
        detail: one sentence for people.
        excerpt: what the row begins with.
    """

    id: str
    source: str
    reason: str
    detail: str
    excerpt: str

    def to_dict(self) -> dict[str, Any]:
        """The keys that ``data preview --json`` prints for a dropped row."""
        return {
            "id": self.id,
            "source": self.source,
            "dropped": self.reason,
            "detail": self.detail,
            "row": self.excerpt,
        }


def dropped_rows(
    data: PreparedData, *, per_reason: int = PER_REASON, max_row_bytes: int = 0
) -> list[DroppedRow]:
    """The first dropped rows of each reason, in the order of the files.

    Args:
        data: prepared.
        per_reason: how many of each.
        max_row_bytes: read the rows again, up to this size, for their excerpts; 0 leaves them out.
    """
    return list(_dropped(data, per_reason, max_row_bytes))


def _dropped(data: PreparedData, per_reason: int, max_row_bytes: int) -> Iterator[DroppedRow]:
    seen: dict[str, int] = {}
    for part in data.parts:
        chosen = []
        for entry in read_ledger(part.store.directory / LEDGER):
            seen[entry.reason] = seen.get(entry.reason, 0) + (entry.action == "dropped")
            if entry.action == "dropped" and seen[entry.reason] <= per_reason:
                chosen.append(entry)
        texts: dict[tuple[int, int], str] = {}
        for file in {int(entry.file) for entry in chosen} if max_row_bytes else ():
            lines = {entry.line for entry in chosen if int(entry.file) == file}
            for raw in read_rows(part.paths[file], max_row_bytes=max_row_bytes):
                if raw.line in lines:
                    texts[file, raw.line] = _excerpt(raw.payload)
                if raw.line >= max(lines):
                    break
        for entry in chosen:
            file = int(entry.file)
            text = texts.get((file, entry.line), "")
            place = f"{part.files[file]}:{entry.line}"
            yield DroppedRow(place, part.name, entry.reason, entry.detail, text)


def _excerpt(payload: Any) -> str:
    if payload is None:
        return ""
    if isinstance(payload, bytes):
        text = payload[: 4 * EXCERPT].decode("utf-8", errors="replace")
    else:
        text = str(payload)
    return text[:EXCERPT] + ("…" if len(text) > EXCERPT else "")
