"""Which samples an epoch shows, and in what order, over several sources.

A sample's place is decided by a hash of (seed, epoch, source, file, row), so adding a source, or
more rows at the end of a file, leaves the order of the others as it was.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MASK64 = np.uint64(0xFFFFFFFFFFFFFFFF)


@dataclass(frozen=True)
class Share:
    """One source as the mixture sees it.

    Attributes:
        keys: (N,) uint64, one stable number per sample; see :func:`row_keys`.
        name: its own among all sources: see :func:`stream_names`.
        weight: its share relative to the others, or None.
        epochs: how often each sample is seen in an epoch.
    """

    keys: np.ndarray
    name: str
    weight: float | None
    epochs: float


def row_keys(
    files: Sequence[str], file: np.ndarray, row: np.ndarray, part: np.ndarray
) -> np.ndarray:
    """(N,) uint64: a stable number for each sample, from its file's name, row and part."""
    bases = np.array([_hash64(name) for name in files] or [0], dtype=np.uint64)
    place = row.astype(np.uint64) * np.uint64(1 << 16) + part.astype(np.uint64)
    return _mix(bases[file] ^ _mix(place))


def stream_names(labels: Sequence[str], paths: Sequence[str]) -> list[str]:
    """What the random numbers of each source are drawn by: its label, if no other has it.

    Sources of one label would be shuffled in lockstep, so theirs is the shortest end of the path
    that no other has: data may move as a whole. The second of one path has ``#2`` behind it.
    """
    parts = [Path(path).parts for path in paths]
    names: list[str] = []
    for label, mine in zip(labels, parts, strict=True):
        others = {p for n, p in zip(labels, parts, strict=True) if n == label and p != mine}
        ends = (mine[-length:] for length in range(1, len(mine) + 1))
        alone = (e for e in ends if e not in {other[-len(e) :] for other in others})
        names.append("/".join(next(alone, mine)) if labels.count(label) > 1 else label)
    return [f"{n}#{names[:i].count(n) + 1}" if n in names[:i] else n for i, n in enumerate(names)]


def epoch_order(shares: Sequence[Share], *, seed: int | None, epoch: int) -> np.ndarray:
    """The sample indices of one epoch, over all sources end to end; of no seed in their own order.

    Without weights every source is seen ``epochs`` times. With weights the epoch has as many
    samples as the sources have together, divided by weight. A source that is not seen whole shows
    its next part in the next epoch.
    """
    sizes = np.array([len(share.keys) * share.epochs for share in shares])
    if any(share.weight is not None for share in shares):
        weights = np.array([1.0 if s.weight is None else s.weight for s in shares])
        weights = np.where(sizes > 0, weights, 0.0)
        # Weight 0 is none of a source, also where nothing else is left.
        sizes = sizes.sum() * weights / max(weights.sum(), np.finfo(float).tiny)
    chosen: list[np.ndarray] = []
    ranks: list[np.ndarray] = []
    start = 0
    for share, size in zip(shares, sizes, strict=True):
        indices, repeats = _take(share, size, seed, epoch)
        if seed is None:
            chosen.append(indices + start)
            start += len(share.keys)
            continue
        salt = np.uint64(_hash64(f"{seed}/{epoch}/{share.name}"))
        place = _mix(repeats.astype(np.uint64) + np.uint64(1))
        ranks.append(_mix(share.keys[indices] ^ salt ^ place))
        chosen.append(indices + start)
        start += len(share.keys)
    if not chosen:
        return np.empty(0, dtype=np.int64)
    indices = np.concatenate(chosen)
    return indices if seed is None else indices[np.argsort(np.concatenate(ranks), kind="stable")]


def choose_rows(keys: np.ndarray, count: int, *, seed: int, name: str) -> np.ndarray:
    """A stable random choice of ``count`` rows: a boolean (N,)."""
    if count >= len(keys):
        return np.ones(len(keys), dtype=bool)
    ranks = _mix(keys ^ np.uint64(_hash64(f"{seed}/choose/{name}")))
    chosen = np.zeros(len(keys), dtype=bool)
    chosen[np.argpartition(ranks, count)[:count]] = True
    return chosen


def _take(share: Share, size: float, seed: int | None, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices for ``size`` samples of one source, and which repetition each is.

    The samples form a ring in stable order, that of the files without a seed; each epoch continues
    where the last one ended.
    """
    total = len(share.keys)
    if total == 0:
        empty = np.empty(0, dtype=np.int64)
        return empty, empty
    begin, end = round(size * epoch), round(size * (epoch + 1))
    salt = np.uint64(_hash64(f"{seed}/ring/{share.name}"))
    ring = np.arange(total) if seed is None else np.argsort(_mix(share.keys ^ salt), kind="stable")
    places = np.arange(begin, end)
    return ring[places % total], places // total - begin // total


def _hash64(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): spreads every bit over all others."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))
