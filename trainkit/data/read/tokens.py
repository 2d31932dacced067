"""Rows that were tokenised elsewhere: their ids, and every mask that may come with them.

A token is trained when each mask that the row has says so. What the ids alone cannot show (pads,
several documents in one row) is read from the fields that other tools write, or refused.
"""

from collections.abc import Mapping
from itertools import pairwise
from operator import ge
from typing import Any

from trainkit.data.read import fields
from trainkit.data.read.messages import RowError, TokenRow
from trainkit.data.read.switches import is_switch

MASKS = ("loss_mask", "completion_mask", "assistant_masks", "assistant_mask", "attention_mask")
"""0 or 1 for each id. ``completion_mask`` and ``assistant_masks`` are TRL's, ``attention_mask`` is
the tokenizer's: its zeros are pads."""

BOUNDARIES = ("seq_lengths", "seq_lens", "cu_seqlens", "cu_seq_lens", "cu_seq_lens_q")
"""Fields that say where the documents of a packed row begin or how long they are."""

HARMLESS = ("special_tokens_mask", "offset_mapping")
"""As long as the ids, and without a say in what is trained."""

READ = ("input_ids", "labels", "position_ids", "token_type_ids", *MASKS, *BOUNDARIES, *HARMLESS)
"""Every field of a tokenised row that is read."""


def parse_tokens(row: Mapping[str, Any]) -> TokenRow:
    """``input_ids`` with any of ``labels`` (-100 is not trained) and ``MASKS``.

    Raises:
        RowError: a field has another length or other values, two contradict each other, or a field
            of the ids' length is not understood.
    """
    ids = fields.integers(row, "input_ids")
    if not ids:
        raise RowError("no_tokens", "'input_ids' is empty")
    if any(not 0 <= token < 2**31 for token in ids):
        raise RowError("token_out_of_range", "'input_ids' holds a number that is not a token id")
    _refuse_unknown(row, len(ids))
    chosen = {name: _mask(row, name, len(ids)) for name in MASKS if row.get(name) is not None}
    if row.get("labels") is not None:
        chosen["labels"] = _labels(row, ids)
    _refuse_contradictions(chosen)
    start, end = _without_pads(chosen.get("attention_mask"), len(ids))
    _refuse_packed(row, start, end, len(ids))
    trained = tuple(all(mask[place] for mask in chosen.values()) for place in range(start, end))
    is_masked = bool(chosen.keys() - {"attention_mask"})
    return TokenRow(ids[start:end], trained, is_masked=is_masked)


def _labels(row: Mapping[str, Any], ids: tuple[int, ...]) -> tuple[bool, ...]:
    labels = fields.integers(row, "labels")
    _same_length("labels", len(labels), len(ids))
    for place, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (-100, token):
            raise RowError(
                "labels_differ",
                f"label {label} at position {place} is neither -100 nor the input id {token}; "
                "labels are given unshifted",
            )
    return tuple(label != -100 for label in labels)


def _mask(row: Mapping[str, Any], name: str, size: int) -> tuple[bool, ...]:
    mask = fields.switches(row, name)
    odd = next((value for value in mask if value not in (0, 1)), None)
    if odd is not None:
        raise RowError("bad_weight", f"{name!r} holds {odd}; it must be 0 or 1")
    _same_length(name, len(mask), size)
    return tuple(value == 1 for value in mask)


def _same_length(name: str, count: int, size: int) -> None:
    if count != size:
        raise RowError("lengths_differ", f"{size} input_ids, {count} in {name!r}")


def _refuse_contradictions(chosen: Mapping[str, tuple[bool, ...]]) -> None:
    """``labels`` or ``loss_mask`` that choose tokens must choose among those of the other masks.

    Where they hold every id but the pads they are a copy that chooses nothing, and the other masks
    decide.
    """
    for name in ("labels", "loss_mask"):
        own = chosen.get(name)
        if own is None or all(map(ge, own, chosen.get("attention_mask", (True,) * len(own)))):
            continue
        for other, mask in chosen.items():
            place = next(
                (n for n, (mine, its) in enumerate(zip(own, mask, strict=True)) if mine > its),
                None,
            )
            if place is not None:
                raise RowError(
                    "masks_disagree",
                    f"{name!r} trains the token at position {place}, where {other!r} does not",
                )


def _without_pads(attention: tuple[bool, ...] | None, size: int) -> tuple[int, int]:
    """The range of tokens that are not pads."""
    if attention is None:
        return 0, size
    if not any(attention):
        raise RowError("no_tokens", "'attention_mask' leaves no token")
    start, end = attention.index(True), size - attention[::-1].index(True)
    if not all(attention[start:end]):
        hole = attention.index(False, start)
        raise RowError(
            "attention_hole",
            f"'attention_mask' is 0 at position {hole}, amid tokens; only pads at the ends may be",
        )
    return start, end


def _refuse_packed(row: Mapping[str, Any], start: int, end: int, size: int) -> None:
    """Several documents in a row would see each other: trainkit packs by itself."""
    for name in ("position_ids", "token_type_ids"):
        if row.get(name) is None:
            continue
        values = fields.integers(row, name)
        _same_length(name, len(values), size)
        step = 1 if name == "position_ids" else 0
        if any(values[n] != (n - start) * step for n in range(start, end)):
            raise _packed(name)
    for name in BOUNDARIES:
        if row.get(name) is None:
            continue
        given = fields.integers(row, name)
        lengths = given if name.startswith("seq") else tuple(b - a for a, b in pairwise(given))
        if lengths not in ((size,), (end - start,)):
            raise _packed(name)


def _packed(name: str) -> RowError:
    return RowError(
        "packed_elsewhere",
        f"{name!r} says that the row is not a single text from position 0 on; give one document a "
        "row, data.packing puts them together",
    )


def _refuse_unknown(row: Mapping[str, Any], size: int) -> None:
    """A field that may be one more mask: passing over it could train a prompt."""
    for name, value in row.items():
        if name in READ or value is None:
            continue
        fits = isinstance(value, (list, tuple)) and len(value) == size and size > 1
        numbers = fits and all(isinstance(item, (int, float)) for item in value)
        if numbers or (is_switch(str(name)) and isinstance(value, (list, tuple))):
            raise RowError(
                "unknown_mask",
                f"{str(name)[:40]!r} may say which tokens are trained, and is not known; write it "
                "as loss_mask, or leave it out",
            )
