"""The evaluation loss: the mean per item (for SFT, per trained token) over all batches and ranks.

transformers averages the means of batches instead, which weighs a short answer in a small batch
more than a long one, and changes with the batch size.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from trainkit.evaluation_mode import evaluation_mode
from trainkit.objectives.batches import BatchCounts
from trainkit.objectives.objective import EvaluatedBatch, Loss
from trainkit.parallel.engine import Ranks


@dataclass(frozen=True)
class Evaluation:
    """Measures a model on batches; no logits are kept.

    Attributes:
        loss: of the objective, on this model.
        ranks: the processes.
        take_counts: takes the counts out of a batch.
        run: has a function of model and batch measure a batch of the host; None where another rank
            has the answer.
        sharing: what the model is called within.
        counts_rows: whether this rank's items are counted: one of those that share the rows.
        counts_losses: whether its losses are: one of those that compute the same.
    """

    loss: Loss
    ranks: Ranks
    take_counts: Callable[[dict[str, Any]], BatchCounts]
    run: Callable[[dict[str, Any], Callable[[Any, dict[str, Any]], EvaluatedBatch]], Any]
    sharing: Callable[[], AbstractContextManager[Any]]
    counts_rows: bool = True
    counts_losses: bool = True

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
            ``PREFIX_loss``, ``PREFIX_num_trained_tokens``, and the objective's own figures.
        """
        # Losses and their items; routers' losses and the batches that have them; trained tokens.
        totals = torch.zeros(5, dtype=torch.float64, device=self.ranks.device)
        with evaluation_mode(model):
            for batch in batches:
                counts = self.take_counts(batch)
                with self.sharing():
                    found = self.run(batch, partial(self.loss.evaluate, num_items=counts.num_items))
                if found is not None:
                    totals[0] += found.loss_sum.double() * self.counts_losses
                totals[1] += counts.num_items * self.counts_rows
                if found is not None and found.router_loss is not None:
                    totals[2] += found.router_loss.double()
                    totals[3] += 1
                totals[4] += counts.num_trained_tokens * self.counts_rows
        own = self.loss.eval_metrics
        if own is not None:
            mine = own.take(totals.device).flatten()
            totals = torch.cat((totals, mine * self.counts_losses))
        totals = self.ranks.reduce(totals, reduction="sum")
        loss_sum, num_items, router_sum, num_batches, num_tokens, *sums = totals.tolist()
        metrics = {
            f"{prefix}_loss": loss_sum / max(num_items, 1) + router_sum / max(num_batches, 1),
            f"{prefix}_num_trained_tokens": int(num_tokens),
        }
        if own is not None:
            metrics |= own.rows(sums, f"{prefix}_")
        return metrics
