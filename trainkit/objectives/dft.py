"""The cross entropy of each token, weighed by what the model makes of it, without a gradient.

Dynamic fine-tuning (DFT) weighs by the token's own probability (Wu et al. 2025, arXiv 2508.05629):
what the model holds for unlikely pulls no harder than the rest. Entropy-adaptive fine-tuning (EAFT)
weighs by the entropy of the likeliest tokens (Diao et al. 2026): where the model is sure of another
one, little pulls.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainkit.kernels.sums import sum_in_chunks
from trainkit.models.loss import LossOptions, configure, token_losses
from trainkit.objectives.answers import Ratios
from trainkit.objectives.distill import trained_logits
from trainkit.objectives.objective import EvaluatedBatch, LossSetup, Step
from trainkit.objectives.sft import SFT, collator
from trainkit.options import EaftOptions
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


class EaftLoss(DftLoss):
    """The same, weighed by ``(entropy / divisor) ** alpha`` of the likeliest tokens alone."""

    def __init__(self, setup: LossSetup) -> None:
        self.options = setup.eaft or EaftOptions()
        self.train_metrics, self.eval_metrics = (
            Ratios(("cross_entropy", "entropy")) for _ in range(2)
        )

    def _loss_sum(self, model: nn.Module, inputs: dict[str, Any], figures: Ratios) -> Tensor:
        given = {key: each for key, each in inputs.items() if key != "num_trained_tokens"}
        targets = next_tokens(given.pop("labels"), IGNORE_INDEX)
        is_trained = targets != IGNORE_INDEX
        logits = trained_logits(model, given, is_trained)
        total = sum_in_chunks(self._sums, logits.shape[1], (logits, targets[is_trained]))
        figures.add({name: (total[n], is_trained.sum()) for n, name in enumerate(figures.names, 1)})
        return total[0]

    def _sums(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """(3,) over some trained tokens: the loss, the cross entropy, the entropy."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = cross_entropy(wide, chosen, reduction="none")
        likeliest = wide.detach().topk(min(self.options.likeliest, wide.shape[1])).values
        logs = likeliest.log_softmax(-1)
        entropy = -(logs.exp() * logs).sum(-1)
        weights = (entropy / self.options.divisor) ** self.options.alpha
        return torch.stack((weights * losses, losses, entropy)).sum(1, dtype=torch.float64)


DFT = replace(
    SFT,
    name="dft",
    collator=lambda shape: collator(shape, with_source=False),
    loss=DftLoss,
    splits_rows=False,
    takes_images=False,
)

EAFT = replace(DFT, name="eaft", loss=EaftLoss)
