"""What can be known of streamed data before training: its first samples, and what names it."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from trainkit.data.build.cache import tokenizer_digest
from trainkit.data.build.stops import EndsOfTurns
from trainkit.data.build.summary import (
    ignored_fields,
    listed_twice,
    plain,
    template_digest,
    warnings_of,
)
from trainkit.data.read.finding import unread_files
from trainkit.data.serve.streaming import Sample, SampleStream

NUM_SAMPLES = 256


@dataclass(frozen=True)
class FirstLook:
    """The beginning of a stream.

    Attributes:
        rows: of its first samples.
        summary: the content of ``data.json``; without counts of rows and tokens.
        eot_token_ids: the end-of-turn tokens that are trained in these rows.
        parts: everything that decides which tokens a step trains on, by name.
    """

    rows: "FirstRows"
    summary: dict[str, Any]
    eot_token_ids: tuple[int, ...]
    parts: dict[str, Any]


class FirstRows:
    """A few rows as a map-style dataset, for checks before training.

    Args:
        rows: complete samples.
        packing: an item is a list of samples, or one.
    """

    def __init__(self, rows: list[list[Sample]], *, packing: bool) -> None:
        self._rows = rows
        self._packing = packing
        self.lengths: np.ndarray = np.array(
            [sum(len(sample["input_ids"]) for sample in row) for row in rows], dtype=np.int64
        )

    def set_epoch(self, epoch: int) -> None:
        """They are the same in every epoch."""

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._rows[index] if self._packing else self._rows[index][0]


def first_look(
    stream: SampleStream, tokenizer: PreTrainedTokenizerBase, *, num_shards: int
) -> FirstLook:
    """Build the first samples, as every process will.

    Args:
        stream: to be looked at.
        tokenizer: its own.
        num_shards: the processes that will load it.

    Raises:
        DataError: what is wrong with the beginning of the data.
    """
    rows, found, counts = stream.first(min(NUM_SAMPLES, stream.buffer))
    samples = [sample for row in rows for sample in row]
    ends = EndsOfTurns(found.ends, tokenizer, stream.options)
    stops = ends.stops(lambda index: sum(_num_trained(sample, index) for sample in samples))
    files = [
        {"path": str(file), "source": source.label, "bytes": file.stat().st_size}
        for source, files in zip(stream.sources, stream.files, strict=True)
        for file in files
    ]
    twice = listed_twice(files)
    summary = {
        "streaming": {"buffer": stream.buffer, "num_shards": num_shards},
        "files": files,
        "sources": [
            {
                "name": source.label,
                "ignored_fields": ignored_fields(each),
                "not_read": [str(file) for file in unread_files(source.path)],
            }
            for source, each in zip(stream.sources, counts, strict=True)
        ],
        "counts": {k: n for k, n in sorted(found.counts.items()) if not k.startswith("ignored:")},
        "ends": dict(ends.counts),
        "end_of_turn": stops,
        "notes": sorted(found.notes),
        "warnings": [*twice, *warnings_of(ends, stops, found.counts)],
        "listed_twice": twice,
        "template_sha256": template_digest(tokenizer, stream.options),
        "tokenizer_sha256": tokenizer_digest(tokenizer),
        "options": plain(stream.options.model_dump()),
    }
    return FirstLook(
        rows=FirstRows(rows, packing=stream.packing),
        summary=summary,
        eot_token_ids=tuple(stops.values()),
        parts=_parts(stream, summary),
    )


def _num_trained(sample: Sample, index: int) -> int:
    return int(np.count_nonzero((sample["input_ids"] == index) & (sample["loss_mask"] == 1)))


def _parts(stream: SampleStream, summary: dict[str, Any]) -> dict[str, Any]:
    chosen = ("max_length", "mask", "truncation", "thinking", "system_policy", "roles", "seed")
    num_files = sum(map(len, stream.files))
    return {
        "files": [
            (sampled_digest(file, num_files), number, None, str(file))
            for number, files in enumerate(stream.files)
            for file in files
        ],
        "formats": [(source.format, sorted(source.columns.items())) for source in stream.sources],
        "streaming": summary["streaming"],
        "template": summary["template_sha256"],
        "tokenizer": summary["tokenizer_sha256"],
        **{key: summary["options"][key] for key in chosen},
        "packing": stream.packing,
        "shuffle": stream.shuffle,
    }


PIECE_BYTES = 1 << 16

MOST_PIECES = 4096
"""So many pieces are read of all files together, but at least the first and last of each."""


def sampled_digest(file: Path, num_files: int = 1) -> str:
    """A digest of a file's size and of pieces spread evenly over it; of all of it up to 1 MiB.

    Reading streamed files whole to hash them would take as long as training on them. A change of
    the same size between the pieces is not seen.

    Args:
        file: to be looked into.
        num_files: of the stream; with many, fewer pieces of each are read.
    """
    size = file.stat().st_size
    count = min(16, max(2, MOST_PIECES // num_files))
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as opened:
        for number in range(count):
            opened.seek(max(size - PIECE_BYTES, 0) * number // (count - 1))
            digest.update(opened.read(PIECE_BYTES))
    return digest.hexdigest()
