"""The divergence of a student's next-token distributions from a teacher's, without their logits.

Chunks of rows go through as in `linear_cross_entropy`: one product makes a chunk of the student's
logits, one of the teacher's, a kernel turns the student's into their gradient, and one product (two
where the head trains) takes that to the hidden states (and the weight).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from trainkit.kernels.cross_entropy.function import LossOptions
from trainkit.kernels.fp8.trained import Directions
from trainkit.kernels.launch import runs_kernel
from trainkit.kernels.linear_cross_entropy.function import (
    check_shapes,
    settings_of,
    with_gradients,
)
from trainkit.kernels.linear_cross_entropy.teacher import DivergenceOptions, Teacher, figures_of
from trainkit.kernels.sums import sum_in_chunks


@torch.compiler.disable(reason="a loop over chunks in one buffer is nothing to trace")
def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    ignore_index: int = -100,
    num_trained: int | None = None,
    chunk_tokens: int | None = None,
    keeps_gradient: bool = True,
    in_fp8: Directions | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The sum of the divergences of all trained rows, with the labels' cross entropy.

    Args:
        hidden: (..., H) of the student.
        weight: (V, H).
        labels: (...), aligned with the rows of ``hidden``.
        teacher_hidden: (..., H'), of the same places; no gradient reaches the teacher.
        teacher_weight: (V', H'); only columns that both have are compared.
        bias: (V,).
        teacher_bias: (V',).
        softcap: of the student's logits, as for `linear_cross_entropy`, like what follows.
        teacher_softcap: of the teacher's.
        ignore_index: the label of rows that are not trained.
        num_trained: at least as many as there are trained labels.
        chunk_tokens: rows whose logits exist at a time.
        keeps_gradient: whether a second backward pass is right.
        in_fp8: whether the student's logits are a product in fp8.
        options: values of `DivergenceOptions`.

    Returns:
        A scalar in fp32 (fp64 for fp64 inputs), not divided by anything; and, without a gradient,
        (4,) the sums of `figures_of` over the trained rows.
    """
    check_shapes(hidden, weight, labels, bias, chunk_tokens)
    check_shapes(teacher_hidden, teacher_weight, labels, teacher_bias, None)
    chosen, softcaps = DivergenceOptions(**options), (softcap, teacher_softcap)
    labels = labels.reshape(-1)
    rows, theirs = (each.flatten(0, -2) for each in (hidden, teacher_hidden))
    if not runs_kernel(hidden, weight):
        trained = (labels != ignore_index).nonzero()[:, 0]
        given = [each.index_select(0, trained) for each in (rows, theirs, labels)]
        heads = ((weight, bias), (teacher_weight, teacher_bias))

        def figures_in(*part: Tensor) -> Tensor:
            return _figures(part, heads, softcaps, chosen).sum(0)

        figures = sum_in_chunks(figures_in, len(weight), given)
        return chosen.loss(figures), figures.detach()
    settings = settings_of(
        hidden,
        weight,
        labels,
        LossOptions(ignore_index, softcap=softcap),
        num_trained=num_trained,
        chunk_tokens=chunk_tokens,
        keeps_gradient=keeps_gradient,
        in_fp8=in_fp8,
        teacher=Teacher(theirs, teacher_weight, teacher_bias, teacher_softcap, chosen),
    )
    loss, sums, *_ = with_gradients(rows, weight, bias, labels, 1, settings)
    return loss, sums


def linear_divergence_reference(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    ignore_index: int = -100,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """From the full logits, differentiable by autograd; the truth in tests."""
    chosen = DivergenceOptions(**options)
    rows, theirs = (each.flatten(0, -2) for each in (hidden, teacher_hidden))
    labels, heads = labels.flatten(), ((weight, bias), (teacher_weight, teacher_bias))
    trained = labels != ignore_index
    given = (rows, theirs, labels.where(trained, 0))
    figures = _figures(given, heads, (softcap, teacher_softcap), chosen)
    sums = figures.where(trained.unsqueeze(-1), 0).sum(0)
    return chosen.loss(sums), sums.detach()


def _figures(
    rows: Any, heads: Any, softcaps: tuple[float | None, float | None], options: DivergenceOptions
) -> Tensor:
    """(N, 4) of rows: both models' hidden states, and the labels."""
    logits = []
    for hidden, head, softcap in zip(rows[:2], heads, softcaps, strict=True):
        found = linear(hidden, *head)
        if softcap is not None:
            found = found.to(torch.promote_types(found.dtype, torch.float32))
            found = softcap * torch.tanh(found / softcap)
        logits.append(found)
    return figures_of(logits[0], logits[1].detach(), rows[2], options)
