"""Gradients that several ranks of a pipeline have a part of, or all of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

_BUCKET = 1 << 26
"""Numbers that are added up over ranks at once."""


def mean_over(gradients: Sequence[torch.Tensor], group: Any, size: int) -> None:
    """The mean of each over the ranks of a group, in place."""
    for bucket in _buckets(gradients):
        flat = torch.cat([each.flatten() for each in bucket])
        torch.distributed.all_reduce(flat, group=group)
        flat.div_(size)
        pieces = flat.split([each.numel() for each in bucket])
        for each, piece in zip(bucket, pieces, strict=True):
            each.copy_(piece.view_as(each))


def gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    """Zeros where a step has left none: the ranks add up together."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _buckets(gradients: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Gradients of one dtype, about `_BUCKET` numbers at a time."""
    for dtype in dict.fromkeys(each.dtype for each in gradients):
        bucket: list[torch.Tensor] = []
        for each in gradients:
            if each.dtype != dtype:
                continue
            bucket.append(each)
            if sum(one.numel() for one in bucket) >= _BUCKET:
                yield bucket
                bucket = []
        if bucket:
            yield bucket
