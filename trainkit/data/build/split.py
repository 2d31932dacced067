"""Holding a part of the training data out, conversation by conversation.

Which conversations are held out follows from their tokens alone: not from a seed, the order of the
files, or what else is in them, so runs with other seeds are judged on the same ones. Conversations
with the same tokens stay together, so none that is evaluated on was trained on.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trainkit.data.build.datasets import Part, PreparedData
from trainkit.errors import DataError


def hold_out(data: PreparedData, amount: int | float) -> tuple[PreparedData, PreparedData]:
    """Divide prepared data into what is trained on and what is held out.

    Args:
        data: all of it.
        amount: a share of the conversations below 1, or a number of them.

    Returns:
        Training and evaluation data over the same stores.

    Raises:
        DataError: either would be empty.
    """
    rows = [_rows_of(part) for part in data.parts]
    digests = np.array([digest for digests, _ in rows for digest in digests], dtype="S16")
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


def _rows_of(part: Part) -> tuple[list[bytes], np.ndarray]:
    """A digest for each row of a source, and the row that each sample belongs to."""
    store = part.store
    if not len(store):
        return [], np.empty(0, dtype=np.int64)
    starts = np.flatnonzero(
        np.concatenate([[True], (np.diff(store.file) != 0) | (np.diff(store.row) != 0)])
    )
    of_sample = np.repeat(np.arange(len(starts)), np.diff([*starts, len(store)]))
    return [digest.tobytes() for digest in store.row_digests], of_sample


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
    made = PreparedData(parts, data.summary, data.eot_token_ids)
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
