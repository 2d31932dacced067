"""The evaluation loss: the mean per trained token over all batches and ranks.

transformers averages the means of batches instead, which weighs a short answer in a small batch
more than a long one, and changes with the batch size.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from trainkit.train.source_loss import SourceLosses
from trainkit.train.step_loss import StepLoss


@dataclass(frozen=True)
class Evaluation:
    """Measures a model on batches; no logits are kept.

    Attributes:
        step_loss: reads a batch's loss as training does.
        accelerator: knows the ranks.
        take_counts: takes the counts out of a batch.
        prepare: moves a batch to the device.
        autocast: what training computes under.
        sources: the losses per source, or None.
    """

    step_loss: StepLoss
    accelerator: Accelerator
    take_counts: Callable[[dict[str, Any]], Mapping[str, int]]
    prepare: Callable[[dict[str, Any]], dict[str, Any]]
    autocast: Callable[[], AbstractContextManager[Any]]
    sources: SourceLosses | None

    @torch.no_grad()
    def measure(
        self, model: nn.Module, batches: Iterable[dict[str, Any]], prefix: str
    ) -> dict[str, float]:
        """Evaluate; all ranks call it together.

        Args:
            model: as it is trained, wrapped.
            batches: of this rank.
            prefix: of the figures' names.

        Returns:
            ``PREFIX_loss``, ``PREFIX_num_trained_tokens``, and those of each source.
        """
        was_training = model.training
        model.eval()
        # Losses and their tokens; routers' losses and the batches that have them.
        totals = torch.zeros(4, dtype=torch.float64, device=self.accelerator.device)
        for batch in batches:
            num_trained = self.take_counts(batch)["num_trained_tokens"]
            inputs = self.prepare(batch)
            source_ids = inputs.pop("source_ids", None)
            with self.autocast():
                loss, router, outputs = self.step_loss.parts(model, inputs, num_trained)
            totals[0] += loss.double()
            totals[1] += num_trained
            if router is not None and num_trained:
                totals[2] += router.double()
                totals[3] += 1
            if self.sources is not None and source_ids is not None:
                logits = outputs.get("logits")
                self.sources.add(source_ids, inputs["labels"], logits, self.step_loss.smoothing)
        model.train(was_training)
        if self.sources is not None:
            totals = torch.cat((totals, self.sources.take(totals.device).flatten()))
        totals = self.accelerator.reduce(totals, reduction="sum")
        loss_sum, num_tokens, router_sum, num_batches, *sums = totals.tolist()
        metrics = {
            f"{prefix}_loss": loss_sum / max(num_tokens, 1) + router_sum / max(num_batches, 1),
            f"{prefix}_num_trained_tokens": int(num_tokens),
        }
        if self.sources is not None:
            metrics |= self.sources.rows(sums, f"{prefix}_")
        return metrics
