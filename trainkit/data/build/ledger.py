"""The ledger: every row that was left out or cut, with file, line and reason."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Literal

Action = Literal["dropped", "cut", "repaired"]


@dataclass(frozen=True)
class Entry:
    """One line of ``dropped.jsonl`` or ``changed.jsonl``.

    Attributes:
        file: path of the file.
        line: where the row starts, as an editor counts.
        action: ``dropped`` (nothing of the row is used), ``cut`` (part of it), ``repaired`` (all of
            it, repaired).
        reason: a stable code.
        detail: one sentence for people.
        tokens: tokens lost, where they are known.
        trained_tokens: trained tokens among them.
    """

    file: str
    line: int
    action: Action
    reason: str
    detail: str
    tokens: int = 0
    trained_tokens: int = 0


LEDGER, CHANGED = "dropped.jsonl", "changed.jsonl"


@dataclass
class FileCounts:
    """What became of the rows of one file."""

    rows: int = 0
    kept: int = 0
    dropped: int = 0
    cut: int = 0
    repaired: int = 0
    not_chosen: int = 0
    samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    tokens_lost: int = 0
    trained_tokens_lost: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    dropped_for: Counter[str] = field(default_factory=Counter)
    cut_for: Counter[str] = field(default_factory=Counter)
    formats: Counter[str] = field(default_factory=Counter)


class Ledger:
    """Collects entries: as counts in memory, and as JSON lines on disk.

    Dropped rows go to ``path``, so it has one line for each row that is not used; cut and repaired
    rows go to ``changed.jsonl`` next to it.

    Args:
        path: the file to append to, made with the first entry; None keeps only the counts.
        changed: the file for cut and repaired rows, if not ``changed.jsonl`` next to it.
    """

    def __init__(self, path: Path | None = None, changed: Path | None = None) -> None:
        self.path = path
        self._changed = changed
        self.counts: Counter[tuple[Action, str]] = Counter()
        self.tokens: Counter[Action] = Counter()
        self.trained_tokens: Counter[Action] = Counter()
        self._streams: dict[Path, IO[str]] = {}

    def add(self, entry: Entry) -> None:
        """Write one entry."""
        self.counts[entry.action, entry.reason] += 1
        self.tokens[entry.action] += entry.tokens
        self.trained_tokens[entry.action] += entry.trained_tokens
        if self.path is None:
            return
        path = self._changed or self.path.with_name(CHANGED)
        path = self.path if entry.action == "dropped" else path
        if path not in self._streams:
            self._streams[path] = path.open("a", encoding="utf-8")
        self._streams[path].write(json.dumps(asdict(entry), ensure_ascii=False) + "\n")

    def num(self, action: Action) -> int:
        """How many rows were treated so."""
        return sum(count for (kind, _), count in self.counts.items() if kind == action)

    def flush(self) -> None:
        """Put what was written where a reader sees it."""
        for stream in self._streams.values():
            stream.flush()

    def close(self) -> None:
        """Close the files."""
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()


def read_ledger(path: Path) -> Iterator[Entry]:
    """The entries of a ledger and of the file next to it; none where there is no file."""
    for file in (path, path.with_name(CHANGED)):
        if file.exists():
            with file.open(encoding="utf-8") as stream:
                for line in stream:
                    yield Entry(**json.loads(line))
