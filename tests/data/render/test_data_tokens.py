"""Rows tokenised elsewhere: every mask that may stand next to the ids is honoured or refused."""

import json

import pytest

from trainkit.data.formats import parse_row
from trainkit.data.messages import RowError

IDS = [5, 6, 7, 8, 9]
PART = [0, 0, 1, 1, 0]
LABELS = [-100, -100, 7, 8, -100]
ALL = [1] * 5
MASKS = ("loss_mask", "completion_mask", "assistant_masks", "assistant_mask")


def trained(**fields):
    row = parse_row({"input_ids": IDS, **fields}, "auto")
    assert len(row.input_ids) == len(row.trained)
    return [
        token for token, is_trained in zip(row.input_ids, row.trained, strict=True) if is_trained
    ]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(
    "beside", [{}, {"labels": IDS}, {"labels": LABELS}, {"attention_mask": ALL}]
)
def test_every_mask_chooses_the_trained_tokens(name, beside):
    assert trained(**{name: PART}, **beside) == [7, 8]
    assert trained(**{name: [bool(value) for value in PART]}, **beside) == [7, 8]


@pytest.mark.parametrize(
    ("mask", "kept"),
    [([1, 1, 1, 0, 0], [5, 6, 7]), ([0, 0, 1, 1, 1], [7, 8, 9]), ([0, 1, 1, 1, 0], [6, 7, 8])],
)
@pytest.mark.parametrize("labels", [None, IDS])
def test_pads_leave_the_row_and_are_never_trained(mask, kept, labels):
    row = parse_row({"input_ids": IDS, "attention_mask": mask, "labels": labels}, "auto")
    assert list(row.input_ids) == kept
    assert all(row.trained)


def test_two_masks_train_what_both_say():
    both = {"completion_mask": [0, 1, 1, 1, 1], "assistant_masks": [1, 1, 0, 0, 1]}
    assert trained(**both) == [6, 9]


REFUSED = {
    "masks_disagree": [
        {"labels": [-100, 6, 7, 8, -100], "completion_mask": PART},
        {"labels": LABELS, "attention_mask": [1, 1, 1, 0, 0]},
        {"loss_mask": [0, 1, 1, 1, 0], "labels": LABELS},
    ],
    "lengths_differ": [{name: [1, 1]} for name in (*MASKS, "attention_mask")]
    + [{"labels": [5, 6]}],
    "bad_weight": [{name: [0, 0, 2, 1, 1]} for name in (*MASKS, "attention_mask")],
    "wrong_type": [{name: [[1] * 5] * 5} for name in (*MASKS, "attention_mask", "labels")]
    + [{name: "11111"} for name in MASKS]
    + [{name: [0.5] * 5} for name in MASKS],
    "attention_hole": [{"attention_mask": [1, 0, 1, 1, 1]}],
    "no_tokens": [{"attention_mask": [0] * 5}],
    "packed_elsewhere": [
        {"position_ids": [0, 1, 2, 0, 1]},
        {"seq_lengths": [3, 2]},
        {"cu_seqlens": [0, 3, 5]},
        {"token_type_ids": [0, 0, 1, 1, 1]},
    ],
    "unknown_mask": [
        {"prompt_mask": PART},
        {"segment_ids": [1, 1, 2, 2, 2]},
        {"loss_weights": [0.0, 0.0, 1.0, 1.0, 1.0]},
        {"train_mask": [1, 0]},
    ],
}


@pytest.mark.parametrize(
    ("reason", "fields"),
    [(reason, fields) for reason, rows in REFUSED.items() for fields in rows],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else value,
)
def test_what_contradicts_or_is_not_understood_is_refused_by_name(reason, fields):
    with pytest.raises(RowError) as error:
        parse_row({"input_ids": IDS, **fields}, "auto")
    assert error.value.reason == reason
    if reason != "no_tokens":
        assert any(name in error.value.detail for name in fields)


def test_what_other_tools_write_beside_the_ids_does_no_harm():
    fields = {
        "position_ids": list(range(5)),
        "token_type_ids": [0] * 5,
        "special_tokens_mask": [1, 0, 0, 0, 1],
        "seq_lengths": [5],
        "cu_seqlens": [0, 5],
        "text": "hello",
        "length": 5,
    }
    row = parse_row({"input_ids": IDS, "completion_mask": PART, **fields}, "auto")
    assert row.trained == (False, False, True, True, False)
    assert row.ignored == ("text", "length")
    left = {"attention_mask": [0, 1, 1, 1, 1], "position_ids": [1, 0, 1, 2, 3]}
    assert trained(**left) == [6, 7, 8, 9]


def test_rows_without_any_mask_are_told_of(write, ready):
    path = write([{"input_ids": IDS, "attention_mask": ALL}, {"input_ids": IDS, "labels": LABELS}])
    data = ready(path)
    assert data.num_trained.tolist() == [4, 2]
    assert "1 rows of input_ids have no labels and no mask" in " ".join(data.summary["warnings"])
