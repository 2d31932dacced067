"""Prepared data: random access to samples over all sources, and the datasets made of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trainkit.data.build.mixing import Share, epoch_order
from trainkit.data.build.packing import pack
from trainkit.data.build.store import Store
from trainkit.options import Source


@dataclass(frozen=True)
class Part:
    """One source's store within the prepared data.

    Attributes:
        source: as it was prepared.
        store: its samples.
        files: the files' names, as shown.
        paths: the files.
        share: its part in the mixture.
        not_read: files of its directory that hold no rows by their names.
        places: (N,) of the samples in the store that are taken; None takes all.
    """

    source: Source
    store: Store
    files: tuple[str, ...]
    paths: tuple[Path, ...]
    share: Share
    not_read: tuple[str, ...] = ()
    places: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.store) if self.places is None else len(self.places)

    def of(self, column: np.ndarray) -> np.ndarray:
        """A column of the store, of the samples that are taken."""
        return column if self.places is None else column[self.places]

    def taking(self, places: np.ndarray) -> "Part":
        """The samples at some places of the store alone."""
        assert self.places is None
        share = replace(self.share, keys=self.share.keys[places])
        return replace(self, places=places, share=share)

    @property
    def name(self) -> str:
        """The source's name."""
        return self.source.label


class PreparedData:
    """All samples of a data section.

    Args:
        parts: one per source, in the order of the recipe.
        summary: the content of ``data.json``.
        eot_token_ids: the end-of-turn tokens that are trained.
    """

    def __init__(
        self, parts: Sequence[Part], summary: Mapping[str, Any], eot_token_ids: Sequence[int]
    ) -> None:
        self.parts = tuple(parts)
        self.summary = dict(summary)
        self.eot_token_ids = tuple(eot_token_ids)
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
        """One sample: ``input_ids`` (S,) int32, ``loss_mask`` (S,) uint8, ``source`` and ``id``."""
        part, place = self.find(index)
        store = self.parts[part].store
        start, end = int(store.offsets[place]), int(store.offsets[place + 1])
        return {
            "input_ids": store.input_ids[start:end],
            "loss_mask": store.loss_mask[start:end],
            "source": part,
            "id": index,
        }

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

    Args:
        data: the prepared data.
        seed: of the mixture; None keeps the order of the files.
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

    Args:
        data: the prepared data.
        max_length: tokens per row.
        seed: of the mixture and the packing; None takes the samples in the order of the files.
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
        """Tokens per row that are not padding."""
        return np.array([int(self.data.lengths[row].sum()) for row in self.rows], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> list[dict[str, Any]]:
        return [self.data[int(sample)] for sample in self.rows[index]]
