"""Batches: exact content, boundaries and labels."""

import numpy as np
import pytest
import torch

from trainkit.data.collator import PackingCollator, PaddingCollator
from trainkit.options.data import IGNORE_INDEX


def sample(ids, mask, source=0):
    return {
        "input_ids": np.array(ids, dtype=np.int32),
        "loss_mask": np.array(mask, dtype=np.uint8),
        "source": source,
    }


A = sample([11, 12, 13], [0, 1, 1])
B = sample([21, 22], [1, 1], source=1)
C = sample([31, 32, 33, 34, 35], [1, 0, 0, 0, 1])
X = IGNORE_INDEX


def test_packed_batch():
    batch = PackingCollator(6, pad_token_id=9)([[A, B], [C]])
    assert batch["input_ids"].tolist() == [[11, 12, 13, 21, 22, 9], [31, 32, 33, 34, 35, 9]]
    assert batch["labels"].tolist() == [[X, 12, 13, X, 22, X], [X, X, X, X, 35, X]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 0]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, 6, 11, 12]
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert torch.equal(batch["cu_seq_lens_q"], batch["cu_seq_lens_k"])
    assert (batch["max_length_q"], batch["max_length_k"]) == (5, 5)
    assert type(batch["max_length_q"]) is int
    names = "cu_seq_lens_k cu_seq_lens_q input_ids labels max_length_k max_length_q position_ids"
    assert sorted(batch) == names.split()
    assert (A["input_ids"].tolist(), B["loss_mask"].tolist()) == ([11, 12, 13], [1, 1])


@pytest.mark.parametrize(
    ("length", "rows", "ends", "longest"),
    [
        (5, [[A, B], [C]], [0, 3, 5, 10], 5),  # full rows have no tail
        (20, [[A]], [0, 3, 20], 17),  # a long one counts as a segment
        (10**12, [[A]], [0, 3, 64], 61),  # and costs no more than what is in the rows
    ],
)
def test_the_tail_of_a_packed_row(length, rows, ends, longest):
    batch = PackingCollator(length, pad_token_id=9)(rows)
    assert batch["cu_seq_lens_q"].tolist() == ends
    assert batch["input_ids"].numel() == ends[-1]
    assert batch["max_length_q"] == longest
    last = ends[-1] - ends[-2]
    assert batch["position_ids"][-1, -last:].tolist() == list(range(last))


def test_packed_row_that_is_too_long_is_refused():
    with pytest.raises(ValueError, match="more than 4 tokens"):
        PackingCollator(4, pad_token_id=9)([[A, B]])


def test_padded_batch():
    batch = PaddingCollator(9, pad_to_multiple_of=4)([A, C])
    assert batch["input_ids"].tolist() == [
        [11, 12, 13, 9, 9, 9, 9, 9],
        [31, 32, 33, 34, 35, 9, 9, 9],
    ]
    assert batch["labels"].tolist() == [[X, 12, 13, X, X, X, X, X], [X, X, X, X, 35, X, X, X]]
    assert batch["attention_mask"].tolist() == [[1] * 3 + [0] * 5, [1] * 5 + [0] * 3]
    assert set(batch) == {"input_ids", "labels", "attention_mask"}
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())


def test_sources_come_only_when_asked():
    packed = PackingCollator(6, 9, with_source=True)([[A, B]])
    assert packed["source_ids"].tolist() == [[0, 0, 0, 1, 1, -1]]
    padded = PaddingCollator(9, with_source=True, pad_to=4)([B])
    assert padded["source_ids"].tolist() == [[1, 1, -1, -1]]
