"""What a student's next-token distributions are held against: a teacher's logits, by chunks.

N rows of a chunk, H hidden, V vocabulary, W the smaller one of both models.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from trainkit.kernels.cross_entropy.function import LossOptions
from trainkit.kernels.launch import HAS_TRITON, INTERPRETING, Kernel, next_power_of_2
from trainkit.kernels.linear_cross_entropy.products import (
    ROWS_MULTIPLE,
    Products,
    logits_buffer,
    rows_that_fill,
)

if HAS_TRITON:
    from trainkit.kernels.linear_cross_entropy.divergence_kernel import divergence_rows

    _ROWS = Kernel(divergence_rows)

KINDS = ("forward_kl", "reverse_kl", "jsd")

_BLOCK = 1024 if INTERPRETING else 2048


class DivergenceOptions(NamedTuple):
    """What the loss of a row is.

    Attributes:
        kind: one of `KINDS`.
        share: the teacher's part of jsd's mixture.
        temperature: both models' logits are divided by it, but not for the cross entropy.
        sft_weight: the part of the label's cross entropy; the rest is the divergence's.
    """

    kind: str = "forward_kl"
    share: float = 0.5
    temperature: float = 1.0
    sft_weight: float = 0.0

    def loss(self, figures: Tensor) -> Tensor:
        """Of figures (..., 4), see `figures_of`."""
        share = self.sft_weight
        return (1 - share) * figures[..., 0] + share * figures[..., 1]


def divergences(student: Tensor, teacher: Tensor, options: DivergenceOptions) -> Tensor:
    """(N,) of log-probabilities (N, outcomes)."""

    def kl(of: Tensor, to: Tensor) -> Tensor:
        return (of.exp() * (of - to)).sum(-1)

    if options.kind == "forward_kl":
        return kl(teacher, student)
    if options.kind == "reverse_kl":
        return kl(student, teacher)
    share = options.share
    mixture = torch.logaddexp(teacher + math.log(share), student + math.log(1 - share))
    return share * kl(teacher, mixture) + (1 - share) * kl(student, mixture)


def figures_of(
    student: Tensor, teacher: Tensor, labels: Tensor, options: DivergenceOptions
) -> Tensor:
    """(N, 4): divergence, cross entropy, whether a token is the likeliest of both, entropy.

    Args:
        student: (N, V) logits.
        teacher: logits of as many rows.
        labels: (N,).
        options: what the divergence is.
    """
    wide = torch.promote_types(student.dtype, torch.float32)
    student, teacher = student.to(wide), teacher.to(wide)
    width, heat = min(student.shape[1], teacher.shape[1]), options.temperature
    mine, theirs = ((each[:, :width] / heat).log_softmax(-1) for each in (student, teacher))
    best = [each[:, :width] >= each.detach().amax(-1, keepdim=True) for each in (student, teacher)]
    figures = (
        divergences(mine, theirs, options),
        -student.log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1),
        (best[0] & best[1]).any(-1).to(wide),
        -(theirs.exp() * theirs).sum(-1),
    )
    return torch.stack(figures, -1)


class Teacher:
    """Its part of the loop over chunks of `compute`.

    Args:
        hidden: (M, H), of the places of the student's.
        weight: (V, H).
        bias: (V,).
        softcap: of its logits.
        options: what the loss is.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        softcap: float | None,
        options: DivergenceOptions,
    ) -> None:
        self._rows, self._weight, self._bias = hidden.detach(), weight.detach(), bias
        self._softcap, self._options = softcap, options

    def chunk_tokens(self, alone: int, width: int, *, trained: bool) -> int:
        """How many rows' logits of both models exist at a time, where one's alone may be so many.

        Where no chunk adds to a weight's gradient, it may be as small as fills a GPU.
        """
        if trained:
            return max(ROWS_MULTIPLE, alone // 2 // ROWS_MULTIPLE * ROWS_MULTIPLE)
        return min(alone, 4 * ROWS_MULTIPLE, rows_that_fill(width))

    def begin(self, dtype: torch.dtype, chosen: Tensor | None, num_rows: int, chunk: int) -> None:
        """Take the chosen rows (all, for None), and memory for one chunk's logits."""
        if chosen is not None:
            self._rows = self._rows.index_select(0, chosen)
        self._rows = self._rows.to(dtype)
        self._products = Products(self._weight, self._bias, dtype)
        self._buffer = logits_buffer(self._rows, chunk, len(self._weight))
        wide = torch.promote_types(dtype, torch.float32)
        self.figures = self._rows.new_empty((num_rows, 4), dtype=wide)

    def compare(
        self,
        part: slice,
        logits: Tensor,
        labels: Tensor,
        losses_out: Tensor,
        scale: Tensor | float,
        loss: LossOptions,
        *,
        want_grad: bool,
    ) -> None:
        """Losses and figures of a chunk; its gradients, times the scale, over the logits (N, V)."""
        theirs = self._buffer[: len(logits), : len(self._weight)]
        self._products.write_logits(theirs, self._rows[part])
        kind, share, heat, sft = self._options
        width = logits.shape[1]
        common = min(width, theirs.shape[1])
        _ROWS.launch(
            len(logits),
            (logits, theirs, labels, losses_out, self.figures[part]),
            (logits.stride(0), theirs.stride(0)),
            (loss.ignore_index,),
            (
                scale,
                KINDS.index(kind),
                heat,
                share,
                sft,
                loss.softcap or 0.0,
                self._softcap or 0.0,
                want_grad,
                width,
                common,
                # Of the columns that both have, with the temperature: not the cross entropy's.
                heat != 1.0 or common < width,
                min(_BLOCK, next_power_of_2(max(16, width))),
            ),
            8,
        )
