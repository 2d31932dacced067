"""Prepared data: samples of all sources, mixed, packed, held out.

A sample's place in an epoch is decided by a hash of (seed, epoch, source, file, row), so adding a
source, or more rows at the end of a file, leaves the order of the others as it was.

Which conversations are held out follows from their tokens alone: not from a seed, the order of the
files, or what else is in them, so runs with other seeds are judged on the same ones. Conversations
with the same tokens stay together, so none that is evaluated on was trained on.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trainkit.data.store import Entry, Store
from trainkit.errors import DataError
from trainkit.options import Source

MASK64 = np.uint64(0xFFFFFFFFFFFFFFFF)


@dataclass(frozen=True)
class Share:
    """One source as the mixture sees it.

    Attributes:
        keys: (N,) uint64, one stable number per sample; see :func:`row_keys`.
        name: its own among all sources: see :func:`stream_names`.
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


def pack(lengths: np.ndarray, max_length: int, *, seed: int, epoch: int) -> list[np.ndarray]:
    """Pack samples best-fit decreasing; a pure function of its arguments.

    Samples are placed longest first, each into the fullest row that still takes it. Which of two
    samples of one length goes first, and the order of the finished rows, is drawn from
    ``(seed, epoch)``. The number of rows depends on the lengths only.
    """
    lengths = np.asarray(lengths)
    if len(lengths) == 0:
        return []
    if int(lengths.max()) > max_length:
        raise ValueError(f"a sample of {int(lengths.max())} tokens exceeds max_length {max_length}")
    max_length = min(max_length, int(lengths.sum()))  # a row never holds more than all samples
    random = np.random.default_rng([seed, epoch])
    shuffled = random.permutation(len(lengths))
    order = shuffled[np.argsort(-lengths[shuffled], kind="stable")]

    rows: list[list[int]] = []
    # open_rows[free]: rows with that many tokens free. `free_sizes` has bit `free` set where there
    # are any, so the fullest row with room for `length` is the lowest bit at or above it.
    open_rows: list[list[int]] = [[] for _ in range(max_length + 1)]
    free_sizes = 0
    for index, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        above = free_sizes >> length
        if above:
            free = length + (above & -above).bit_length() - 1
            row = open_rows[free].pop()
            if not open_rows[free]:
                free_sizes &= ~(1 << free)
            rows[row].append(index)
        else:
            free = max_length
            row = len(rows)
            rows.append([index])
        rest = free - length
        if rest:
            open_rows[rest].append(row)
            free_sizes |= 1 << rest
    return [np.array(rows[row], dtype=np.int64) for row in random.permutation(len(rows))]


def efficiency(lengths: np.ndarray, max_length: int) -> float:
    """The share of tokens in the packed rows that are not padding."""
    rows = pack(lengths, max_length, seed=0, epoch=0)
    return float(np.sum(lengths)) / (len(rows) * max_length) if rows else 0.0


@dataclass(frozen=True)
class Part:
    """One source's store within the prepared data.

    Attributes:
        not_read: files of its directory that hold no rows by their names.
        places: (N,) of the samples in the store that are taken; None takes all.
    """

    source: Source
    store: Store
    files: tuple[str, ...]
    paths: tuple[Path, ...]
    share: Share
    not_read: tuple[str, ...] = ()
    rows: Sequence[dict[str, Any]] = ()
    places: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.store) if self.places is None else len(self.places)

    def of(self, column: np.ndarray) -> np.ndarray:
        return column if self.places is None else column[self.places]

    def taking(self, places: np.ndarray) -> "Part":
        """Those at some places of its samples alone."""
        share = replace(self.share, keys=self.share.keys[places])
        return replace(self, places=self.of(np.arange(len(self.store)))[places], share=share)

    @property
    def name(self) -> str:
        return self.source.label


class PreparedData:
    """All samples of a data section."""

    def __init__(self, parts: Sequence[Part], summary: Mapping[str, Any]) -> None:
        self.parts = tuple(parts)
        self.summary = dict(summary)
        self.source_names = tuple(part.name for part in self.parts)
        sizes = np.cumsum([0, *(len(part) for part in self.parts)])
        self.starts, self._total = sizes[:-1], int(sizes[-1])
        empty = np.empty(0, dtype=np.int64)
        self.lengths: np.ndarray = np.concatenate(
            [empty, *(part.of(part.store.lengths) for part in self.parts)]
        )
        self.num_trained: np.ndarray = np.concatenate(
            [empty, *(part.of(part.store.num_trained) for part in self.parts)]
        )

    def __len__(self) -> int:
        return self._total

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One sample: ``input_ids`` (S,) int32, ``loss_mask`` (S,) uint8, ``source`` and ``id``.

        One with images has them as ``images``.
        """
        part, place = self.find(index)
        store = self.parts[part].store
        start, end = int(store.offsets[place]), int(store.offsets[place + 1])
        images = () if store.images is None else store.images.of(place)
        return {
            "input_ids": store.input_ids[start:end],
            "loss_mask": store.loss_mask[start:end],
            "source": part,
            "id": index,
            **({"images": images} if images else {}),
        }

    @property
    def num_images(self) -> int:
        """Those of all samples; one that is in several counts so often."""
        return int(self._per_sample(0).sum())

    @property
    def num_image_tokens(self) -> int:
        """Placeholders of all samples."""
        return int(self._per_sample(1).sum())

    def _per_sample(self, which: int) -> np.ndarray:
        """(N,) images of each sample, or (1) their tokens."""
        found = [np.empty(0, dtype=np.int64)]
        for part in self.parts:
            images = part.store.images
            if images is not None:
                tokens = np.concatenate([[0], np.cumsum(images.images[:, -1])])
                ends = tokens[images.offsets] if which else images.offsets
                found.append(part.of(np.diff(ends)))
        return np.concatenate(found)

    def sample_id(self, index: int) -> str:
        """``file:line``, with ``#part`` where a row became several samples."""
        part, place = self.find(index)
        store = self.parts[part].store
        number = int(store.part[place])
        name = f"{self.parts[part].files[int(store.file[place])]}:{int(store.line[place])}"
        return f"{name}#{number}" if number else name

    def find(self, index: int) -> tuple[int, int]:
        """The part a sample is in, and its place in that part's store."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        part = int(np.searchsorted(self.starts, index, side="right")) - 1
        place, places = index - int(self.starts[part]), self.parts[part].places
        return part, place if places is None else int(places[place])

    @property
    def has_equal_epochs(self) -> bool:
        """Whether every epoch shows the same samples; not where sources are shown in part."""
        shares = [part.share for part in self.parts]
        return all(share.weight is None and float(share.epochs).is_integer() for share in shares)

    def epoch_order(self, *, seed: int | None, epoch: int) -> np.ndarray:
        """The sample indices of one epoch, mixed over the sources and shuffled stably.

        Without a seed they are in the order of the files.
        """
        return epoch_order([part.share for part in self.parts], seed=seed, epoch=epoch)


class SampleDataset:
    """A map-style dataset of single samples.

    Without a seed samples keep the order of the files.
    """

    def __init__(self, data: PreparedData, *, seed: int | None = None) -> None:
        self.data = data
        self._seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch.

        Its length is that of the first; only sources that are shown in part may change it.
        """
        self._order = self.data.epoch_order(seed=self._seed, epoch=epoch)
        self.lengths: np.ndarray = self.data.lengths[self._order]

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.data[int(self._order[index])]


class PackedDataset:
    """A map-style dataset of packed rows: each item is a list of complete samples.

    The rows of an epoch are a pure function of (data, seed, epoch), so a run resumes at any
    position without reading what came before.

    Without a seed samples are taken in the order of the files.
    """

    def __init__(self, data: PreparedData, max_length: int, *, seed: int | None = 0) -> None:
        self.data = data
        self.max_length = max_length
        self._seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Pack again for an epoch.

        The number of rows stays the same as long as each epoch shows the same samples; it may
        change where sources are shown in part.
        """
        order = self.data.epoch_order(seed=self._seed, epoch=epoch)
        rows = pack(self.data.lengths[order], self.max_length, seed=self._seed or 0, epoch=epoch)
        self.rows: list[np.ndarray] = [order[row] for row in rows]

    @property
    def lengths(self) -> np.ndarray:
        return np.array([int(self.data.lengths[row].sum()) for row in self.rows], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> list[dict[str, Any]]:
        return [self.data[int(sample)] for sample in self.rows[index]]


def hold_out(data: PreparedData, amount: int | float) -> tuple[PreparedData, PreparedData]:
    """Divide prepared data into what is trained on and what is held out.

    ``amount`` is a share of the conversations below 1, or a number of them.
    """
    rows = [_rows_of(part) for part in data.parts]
    digests = np.concatenate([digests for digests, _ in rows])
    groups, inverse, sizes = np.unique(digests, return_inverse=True, return_counts=True)
    total = len(digests)
    wanted = round(total * amount) if amount < 1 else int(amount)
    chosen = np.zeros(len(groups), dtype=bool)
    taken = 0
    for group, size in enumerate(sizes):  # in the order of the digests, which is a shuffled one
        if taken + size <= wanted:
            chosen[group] = True
            taken += int(size)
        if taken == wanted:
            break
    if not 0 < taken < total:
        raise DataError(
            f"{amount} of {total} conversations ({len(groups)} different ones) leaves "
            f"{taken} to evaluate on and {total - taken} to train on",
            where="data.eval",
            fix="hold out more or fewer, or give held-out files",
        )
    sides = _sides(data.parts, [of_sample for _, of_sample in rows], chosen[inverse])
    digest = hashlib.sha256(groups[chosen].tobytes()).hexdigest()[:16]
    note = {"conversations": taken, "of": total, "digest": digest}
    note["duplicates"] = taken - int(chosen.sum())
    return _with_summary(data, sides[0], note), _with_summary(data, sides[1], note, held=True)


def num_of_trained(train: PreparedData, held: PreparedData) -> list[tuple[str, int]]:
    """By source of what is held out: how many of its rows have the tokens of one that is not."""
    trained = np.concatenate([_rows_of(part)[0] for part in train.parts])
    return [(part.name, int(np.isin(_rows_of(part)[0], trained).sum())) for part in held.parts]


def _rows_of(part: Part) -> tuple[np.ndarray, np.ndarray]:
    """A digest for each row of a source, and the row that each sample belongs to."""
    store = part.store
    if not len(part):
        return np.empty(0, dtype="S16"), np.empty(0, dtype=np.int64)
    starts = np.flatnonzero(
        np.concatenate([[True], (np.diff(store.file) != 0) | (np.diff(store.row) != 0)])
    )
    of_sample = np.repeat(np.arange(len(starts)), np.diff([*starts, len(store)]))
    rows, of_sample = np.unique(part.of(of_sample), return_inverse=True)
    return np.ascontiguousarray(store.row_digests[rows]).view("S16").ravel(), of_sample


def without_copies(part: Part, seen: set[bytes]) -> tuple[Part, list[Entry]]:
    """A source without rows whose samples are those of an earlier row; and the ledger of these.

    ``seen`` are the earlier rows; this source's are added.
    """
    store, (digests, of_sample) = part.store, _rows_of(part)
    firsts = np.searchsorted(of_sample, np.arange(len(digests) + 1))
    is_copy, entries = np.zeros(len(digests), dtype=bool), list[Entry]()
    named = ("reasons", "dropped_for")
    rows = [{**row, **{key: Counter(row[key]) for key in named}} for row in part.rows]
    for number, digest in enumerate(digests):
        samples = slice(int(firsts[number]), int(firsts[number + 1]))
        ends = store.offsets[samples.start : samples.stop + 1]
        mask = store.loss_mask[ends[0] : ends[-1]].tobytes()
        # Which part of its row a sample is says of answers which are the better ones.
        row = digest + np.diff(ends).tobytes() + store.part[samples].tobytes() + mask
        mark = hashlib.blake2b(row, digest_size=16).digest()
        is_copy[number] = mark in seen
        seen.add(mark)
        if is_copy[number]:
            file, tokens = int(store.file[samples.start]), int(ends[-1] - ends[0])
            place = part.files[file], int(store.line[samples.start])
            said = "an exact copy of a row before it"
            trained = int(store.num_trained[samples].sum())
            entries.append(Entry(*place, "dropped", "duplicate", said, tokens, trained))
            lost = {"kept": 1, "left_out": -1, "samples": len(ends) - 1}
            lost |= {"tokens": tokens, "trained_tokens": trained}
            if store.images is not None:
                at = slice(*store.images.offsets[[samples.start, samples.stop]])
                of_images = store.images.images[at, -1]
                lost |= {"images": len(of_images), "image_tokens": int(of_images.sum())}
            rows[file] |= {key: rows[file][key] - less for key, less in lost.items()}
            for key in named:
                rows[file][key]["duplicate"] += 1
    kept = part.taking(np.flatnonzero(~is_copy[of_sample]))
    return replace(kept, rows=rows), entries


def _sides(
    parts: Sequence[Part], of_samples: Sequence[np.ndarray], is_held: np.ndarray
) -> tuple[list[Part], list[Part]]:
    trained, held = [], []
    start = 0
    for part, of_sample in zip(parts, of_samples, strict=True):
        count = int(of_sample.max(initial=-1)) + 1
        mine = is_held[start : start + count][of_sample]
        start += count
        trained.append(part.taking(np.flatnonzero(~mine)))
        share = replace(part.share, weight=None, epochs=1.0)  # evaluation shows every row once
        held.append(replace(part, share=share).taking(np.flatnonzero(mine)))
    return trained, held


def _with_summary(
    data: PreparedData, parts: Sequence[Part], note: dict[str, Any], *, held: bool = False
) -> PreparedData:
    made = PreparedData(parts, data.summary)
    totals = {
        "samples": len(made),
        "tokens": int(made.lengths.sum()),
        "trained_tokens": int(made.num_trained.sum()),
    }
    made.summary["held_out"] = note
    if held:  # the files are those of the training data, which has their rows
        made.summary |= {
            "files": [],
            "sources": [],
            "warnings": [],
            "listed_twice": [],
            "dropped": {},
        }
    before = dict.fromkeys(data.summary["totals"], 0) if held else data.summary["totals"]
    made.summary["totals"] = {**before, **totals}
    return made
