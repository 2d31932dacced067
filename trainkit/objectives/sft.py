"""Supervised fine-tuning: the cross entropy of the trained tokens, each weighing the same."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from trainkit.data.build.datasets import PackedDataset, PreparedData, SampleDataset
from trainkit.data.serve.collator import PackingCollator, PaddingCollator
from trainkit.models.loss.loss_head import IGNORE_INDEX, LossHead, LossOptions
from trainkit.objectives.batches import EpochDataset
from trainkit.objectives.objective import EvaluatedBatch, LossSetup, Objective, RowShape, Step
from trainkit.objectives.source_loss import SourceLosses
from trainkit.objectives.step_loss import StepLoss
from trainkit.parallel.rows import next_tokens


class TokenMeanLoss:
    """The mean over all trained tokens of a step, and what each source has of it."""

    def __init__(self, setup: LossSetup) -> None:
        model = setup.model
        self._step_loss = StepLoss.of(
            model,
            takes_num_items=setup.takes_num_items,
            options=LossOptions(
                label_smoothing=setup.label_smoothing,
                chunk_tokens=setup.chunk_tokens,
                keeps_gradient=setup.keeps_gradient,
            ),
        )
        self._has_loss_head = any(isinstance(module, LossHead) for module in model.modules())
        self.trainer_counts = setup.takes_num_items
        self.train_metrics = SourceLosses.of(model, setup.train_sources)
        self.eval_metrics = SourceLosses.of(model, setup.eval_sources)

    def num_items(self, batch: dict[str, Any], num_trained_tokens: int) -> int:
        """Trained tokens; the batch carries their number to where the loss is computed."""
        batch["num_trained_tokens"] = num_trained_tokens
        return num_trained_tokens

    def training(
        self, model: nn.Module, inputs: dict[str, Any], step: Step
    ) -> tuple[torch.Tensor, Any]:
        """The model's own loss, weighed by tokens."""
        ours = self._step_loss
        aimed, num_trained = self._taken(inputs)
        if ours.smoother is not None:
            loss, outputs = ours.smoothed(model, inputs, step)
        else:
            given = step.num_items if ours.takes_num_items else None
            loss, outputs = step.trainer_loss(model, inputs, given)
            loss = ours.share(loss, outputs, step, num_trained=num_trained)
        self._tell_apart(self.train_metrics, aimed, outputs)
        return loss, outputs

    def evaluate(self, model: nn.Module, inputs: dict[str, Any], num_items: int) -> EvaluatedBatch:
        """The same quantity, from the same parts."""
        aimed, _ = self._taken(inputs)
        loss, router, outputs = self._step_loss.parts(model, inputs, num_items)
        self._tell_apart(self.eval_metrics, aimed, outputs)
        return EvaluatedBatch(loss, router if num_items else None)

    def _taken(
        self, inputs: dict[str, Any]
    ) -> tuple[tuple[torch.Tensor, torch.Tensor] | None, int]:
        """Take out what the model's forward does not take.

        Returns:
            What each token is to predict and the source of that, (B, S); None where sources are
            not kept apart. And the number of trained tokens.
        """
        source_ids, num_trained = inputs.pop("source_ids", None), inputs["num_trained_tokens"]
        if not self._has_loss_head:
            del inputs["num_trained_tokens"]
        if source_ids is None:
            return None, num_trained
        if "shift_labels" in inputs:  # a part of a row: shifted while the row was whole
            return (inputs["shift_labels"], source_ids), num_trained
        targets = next_tokens(inputs["labels"], IGNORE_INDEX)
        return (targets, next_tokens(source_ids, -1)), num_trained

    def _tell_apart(
        self,
        sources: SourceLosses | None,
        aimed: tuple[torch.Tensor, torch.Tensor] | None,
        outputs: Any,
    ) -> None:
        if sources is not None and aimed is not None:
            targets, source_ids = aimed
            sources.add(source_ids, targets, outputs.get("logits"), self._step_loss.smoothing)


def _dataset(data: PreparedData, shape: RowShape, seed: int | None) -> EpochDataset:
    if shape.packing:
        return PackedDataset(data, shape.max_length, seed=seed)
    return SampleDataset(data, seed=seed)


def _collator(shape: RowShape) -> Callable[[Sequence[Any]], dict[str, Any]]:
    with_source = bool(shape.sources)
    if shape.packing:
        return PackingCollator(
            shape.max_length,
            shape.pad_token_id,
            with_source=with_source,
            pad_to_multiple_of=shape.multiple,
        )
    return PaddingCollator(
        shape.pad_token_id, with_source=with_source, pad_to_multiple_of=shape.multiple
    )


SFT = Objective(
    name="sft",
    formats=None,
    packs=True,
    streams=True,
    dataset=_dataset,
    collator=_collator,
    loss=TokenMeanLoss,
    splits_rows=True,
)
