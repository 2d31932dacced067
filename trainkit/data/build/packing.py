"""Best-fit packing: complete samples into rows of ``max_length`` tokens."""

import numpy as np


def pack(lengths: np.ndarray, max_length: int, *, seed: int, epoch: int) -> list[np.ndarray]:
    """Pack samples best-fit decreasing; a pure function of its arguments.

    Samples are placed longest first, each into the fullest row that still takes it. Which of two
    samples of one length goes first, and the order of the finished rows, is drawn from
    ``(seed, epoch)``. The number of rows depends on the lengths only.

    Args:
        lengths: tokens per sample, each at most ``max_length``.
        max_length: tokens per row.
        seed: chooses the order.
        epoch: counted from 0; each epoch packs again.

    Returns:
        one array of sample indices per row.

    Raises:
        ValueError: a sample is longer than a row.
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
    order_of_rows = random.permutation(len(rows))
    return [np.array(rows[row], dtype=np.int64) for row in order_of_rows]


def efficiency(lengths: np.ndarray, max_length: int) -> float:
    """The share of tokens in the packed rows that are not padding."""
    rows = pack(lengths, max_length, seed=0, epoch=0)
    return float(np.sum(lengths)) / (len(rows) * max_length) if rows else 0.0
