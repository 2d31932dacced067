"""Dynamic fine-tuning (DFT): the cross entropy of each token, weighed by its own probability.

The weight has no gradient (Wu et al. 2025, arXiv 2508.05629). Tokens that the model holds for
unlikely then pull no harder than others.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.models.loss import LossOptions, configure, token_losses
from trainkit.objectives.answers import Ratios
from trainkit.objectives.objective import EvaluatedBatch, LossSetup, Step
from trainkit.objectives.sft import SFT, collator
from trainkit.options.data import IGNORE_INDEX
from trainkit.parallel.rows import next_tokens

FIGURES = ("cross_entropy", "probability")
"""Means over the trained tokens: what `sft` would have as its loss, and the weight."""


class DftLoss:
    """The mean over the trained tokens of a step."""

    def __init__(self, setup: LossSetup) -> None:
        configure(setup.model, LossOptions(chunk_tokens=setup.chunk_tokens))
        self.train_metrics, self.eval_metrics = Ratios(FIGURES), Ratios(FIGURES)

    def num_items(self, batch: dict[str, Any], num_trained_tokens: int) -> int:
        """Trained tokens."""
        batch["num_trained_tokens"] = num_trained_tokens
        return num_trained_tokens

    def training(self, model: nn.Module, inputs: dict[str, Any], step: Step) -> tuple[Tensor, Any]:
        """A micro-batch's part of the step's mean."""
        return step.share(self._loss_sum(model, inputs, self.train_metrics)), None

    def evaluate(self, model: nn.Module, inputs: dict[str, Any], num_items: int) -> EvaluatedBatch:
        """The sum over the batch's tokens."""
        return EvaluatedBatch(self._loss_sum(model, inputs, self.eval_metrics))

    def _loss_sum(self, model: nn.Module, inputs: dict[str, Any], figures: Ratios) -> Tensor:
        is_trained = next_tokens(inputs["labels"], IGNORE_INDEX) != IGNORE_INDEX
        losses = token_losses(model, inputs)
        weights = torch.exp(-losses.detach())
        figures.add({"cross_entropy": (losses, is_trained), "probability": (weights, is_trained)})
        return (weights * losses).sum(dtype=torch.float64)


DFT = replace(
    SFT,
    name="dft",
    collator=lambda shape: collator(shape, with_source=False),
    loss=DftLoss,
    splits_rows=False,
    takes_images=False,
)
