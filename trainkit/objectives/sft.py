"""Supervised fine-tuning: the cross entropy of the trained tokens, each weighing the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers.trainer_pt_utils import LabelSmoother

from trainkit.auto_class import without_adapters
from trainkit.data.collator import ImageCollator, PackingCollator, PaddingCollator
from trainkit.data.datasets import PackedDataset, PreparedData, SampleDataset
from trainkit.data.vision import Vision
from trainkit.models.linears import expert_parameters
from trainkit.models.loss import (
    LossHead,
    LossOptions,
    configure,
    losses_of_logits,
    take_row_losses,
    takes_loss_from_head,
)
from trainkit.objectives.objective import (
    EpochDataset,
    EvaluatedBatch,
    LossSetup,
    Objective,
    RowShape,
    Step,
    Sums,
)
from trainkit.objectives.routing import RouterLosses, Routing, Together, real_tokens
from trainkit.options.data import IGNORE_INDEX
from trainkit.parallel.rows import next_tokens


def _is_cut(model: nn.Module) -> bool:
    """A rank of a pipeline sees its own layers' experts, of micro-batches that cross."""
    from trainkit.parallel.pipeline.chain import Placeholder

    return any(isinstance(each, Placeholder) for each in model.modules())


class TokenMeanLoss:
    """The mean over all trained tokens of a step, and what each source has of it.

    A step's loss is the sum over its trained tokens, divided by their number over all micro-batches
    and ranks. Most classes divide by a number that they are given. Some (``accepts_loss_kwargs =
    False``: gemma4, gemma3n and others) return the mean of their own micro-batch, which weighs what
    the micro-batch has of the step's trained tokens. What a model adds for its routers is taken out
    again for `RouterLosses`, which evaluations keep apart.
    """

    def __init__(self, setup: LossSetup) -> None:
        model, smoothing = setup.model, setup.label_smoothing
        from_head = takes_loss_from_head(model)
        if from_head:
            configure(
                model,
                LossOptions(
                    label_smoothing=smoothing,
                    chunk_tokens=setup.chunk_tokens,
                    keeps_gradient=setup.keeps_gradient,
                ),
            )
        # Labels are smoothed here where the model returns logits, else by its own head.
        self._smoothing = 0.0 if from_head else smoothing
        self._smoother = LabelSmoother(epsilon=smoothing) if self._smoothing else None
        self._takes_num_items = setup.takes_num_items
        self._own_factor = _router_coefficient(model)
        self.routers = RouterLosses(
            model, self._own_factor, setup.router_aux_loss, setup.router_z_loss
        )
        self._has_loss_head = any(isinstance(module, LossHead) for module in model.modules())
        self._sources, self._eval_sources = (
            SourceLosses(model, sources) if sources else None
            for sources in (setup.train_sources, setup.eval_sources)
        )
        has_experts = bool(expert_parameters(model)) and not _is_cut(model)
        self._routing = Routing(model) if has_experts else None
        self.train_metrics = Together.of(self._sources, self._routing)
        self.eval_metrics = Together.of(
            self._eval_sources, self.routers if self.routers.is_on else None
        )

    @property
    def counts_ahead(self) -> bool:
        """Whether a step of several micro-batches must be counted before its first gradient."""
        return self.routers.is_on

    @property
    def seen(self) -> torch.Tensor | None:
        return self.routers.seen

    @seen.setter
    def seen(self, counts: torch.Tensor | None) -> None:
        self.routers.seen = counts

    def ahead(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """What the routers' losses must know of a step, of a micro-batch of it."""
        given = dict(inputs)
        self._taken(given)
        one = torch.ones((), device=given["labels"].device)
        extra = {"num_items_in_batch": one} if self._takes_num_items else {}
        outputs = model(**given, **extra, **self.routers.forward_options)
        return self.routers.count(outputs, real_tokens(given)).detach()

    def num_items(self, batch: dict[str, Any], num_trained_tokens: int) -> int:
        batch["num_trained_tokens"] = num_trained_tokens
        return num_trained_tokens

    def training(
        self, model: nn.Module, inputs: dict[str, Any], step: Step
    ) -> tuple[torch.Tensor, Any]:
        aimed, num_trained = self._taken(inputs)
        parts, takes = step.num_micro_batches, self._takes_num_items
        if self._routing is not None:
            self._routing.begin(inputs)
        real = real_tokens(inputs) if self.routers.is_on else None
        given = {**inputs, **self.routers.forward_options}
        if self._smoother is not None:
            # Trainer's own way would leave the routers out, and the shift by one for some classes.
            loss, outputs = self._from_logits(model, given, step.num_items)
            loss = loss * step.num_ranks
            loss = loss if takes else loss * parts
        else:
            loss, outputs = step.trainer_loss(model, given, step.num_items if takes else None)
            own = self._own(outputs)
            if takes:
                loss = loss - own * step.num_ranks
            else:
                # Of the step's trained tokens, over all ranks.
                share = 0.0 if step.num_items is None else num_trained / step.num_items
                if not num_trained:  # the mean of nothing is NaN; its gradient is zero
                    loss = loss.nan_to_num()
                loss = (loss - own) * share * step.num_ranks * parts
        if real is not None:
            mine = self.routers.count(outputs, real)
            if self.seen is None:  # a step of one micro-batch
                self.seen = step.total(mine.detach())
            added = self.routers.losses(mine, self.seen)
            if self._routing is not None:
                self._routing.add_losses(added, mine[-1].detach() / self.seen[-1])
            loss = loss + added.sum().to(loss) * (step.num_ranks * (1 if takes else parts))
        self._tell_apart(self._sources, aimed, outputs)
        return loss, outputs

    def evaluate(self, model: nn.Module, inputs: dict[str, Any], num_items: int) -> EvaluatedBatch:
        aimed, num_trained = self._taken(inputs)
        one = torch.ones((), device=inputs["labels"].device)
        given = {**inputs, **self.routers.forward_options}
        if self._smoother is not None:
            loss, outputs = self._from_logits(model, given, one)
        else:
            outputs = model(
                **given, **({"num_items_in_batch": one} if self._takes_num_items else {})
            )
            loss = outputs["loss"] - self._own(outputs)
            if not self._takes_num_items:
                loss = loss * num_trained if num_trained else torch.zeros_like(loss)
        if (
            self.routers.is_on and num_items
        ):  # a rank without rows repeats one, of which none counts
            self.routers.add(outputs, real_tokens(inputs))
        self._tell_apart(self._eval_sources, aimed, outputs)
        return EvaluatedBatch(loss)

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

    def _from_logits(
        self, model: nn.Module, inputs: Mapping[str, Any], num_items: torch.Tensor | int | None
    ) -> tuple[torch.Tensor, Any]:
        """The loss with smoothed labels, divided by a number; the outputs."""
        assert self._smoother is not None
        given = dict(inputs)
        labels = given.pop("labels")
        targets = given.pop("shift_labels", None)
        if targets is None:
            targets = next_tokens(labels, IGNORE_INDEX)
        outputs = model(**given)
        return self._smoother(outputs, targets, num_items_in_batch=num_items), outputs

    def _own(self, outputs: Any) -> torch.Tensor | float:
        """What the model has added for its routers."""
        auxiliary = outputs.get("aux_loss") if self._own_factor else None
        return 0.0 if auxiliary is None else self._own_factor * auxiliary

    def _tell_apart(
        self,
        sources: SourceLosses | None,
        aimed: tuple[torch.Tensor, torch.Tensor] | None,
        outputs: Any,
    ) -> None:
        if sources is not None and aimed is not None:
            targets, source_ids = aimed
            sources.add(source_ids, targets, outputs.get("logits"), self._smoothing)


def _router_coefficient(model: nn.Module) -> float:
    """The factor that the model's forward has for its routers' auxiliary loss."""
    base = without_adapters(model)
    for holder in (base, base.config.get_text_config()):
        for name in ("router_aux_loss_coef", "aux_loss_coef"):
            value = getattr(holder, name, None)
            if isinstance(value, int | float):
                return float(value)
    return 0.0


# The loss of each source, kept apart on the device while batches go by.
#
# The sums stay on the device until a row is logged, so no step waits for them. B batch, S
# sequence, V vocabulary, G sources.


def distinct_labels(names: Sequence[str]) -> tuple[str, ...]:
    """The names of sources, the second one of the same name with ``#2`` behind it, and so on."""
    return tuple(
        f"{name}#{names[:index].count(name) + 1}" if name in names[:index] else name
        for index, name in enumerate(names)
    )


class SourceLosses(Sums):
    """Sums of losses and of trained tokens per source, (2, G).

    A loss head hands over the losses of its rows; where a model computes logits instead, they are
    read once more, in chunks.
    """

    def __init__(self, model: nn.Module, labels: Sequence[str]) -> None:
        self.labels = tuple(labels)
        self.shape = (2, len(self.labels))
        self._heads = [module for module in model.modules() if isinstance(module, LossHead)]
        for head in self._heads:
            head.keeps_row_losses = True

    @torch.no_grad()
    def add(
        self,
        source_ids: torch.Tensor,
        targets: torch.Tensor,
        logits: torch.Tensor | None,
        label_smoothing: float = 0.0,
    ) -> None:
        """Add the batch that just went through the model.

        Sources other than 0..G-1 count nowhere.

        Args:
            source_ids: (B, S), the source of each target; other numbers than 0..G-1 count nowhere.
            targets: (B, S), what each token is to predict: the label of the next one.
            logits: (B, S, V), or None where the loss came out of the head.
            label_smoothing: for losses from logits.
        """
        losses = take_row_losses(self._heads)
        if logits is not None:
            losses = losses_of_logits(logits, targets, label_smoothing)
        if losses is None:
            raise RuntimeError("neither a loss head nor logits say what the rows' losses are")
        everyone = torch.arange(len(self.labels), device=targets.device)
        belongs = (source_ids[..., None] == everyone) & (targets[..., None] != IGNORE_INDEX)
        rows = losses[..., None]
        # where, not a product: a loss that is NaN or infinite must not reach the other sources.
        sums = torch.where(belongs, rows, 0).sum((0, 1), dtype=torch.float64)
        self.put(torch.stack((sums, belongs.sum((0, 1)).double())))

    def rows(self, sums: Sequence[float], prefix: str = "") -> dict[str, float]:
        """What the log says: ``loss/NAME`` and ``num_trained_tokens/NAME`` of sources."""
        count = len(self.labels)
        found: dict[str, float] = {}
        for label, loss, trained in zip(self.labels, sums[:count], sums[count:], strict=True):
            if trained:
                found[f"{prefix}loss/{label}"] = loss / trained
                found[f"{prefix}num_trained_tokens/{label}"] = int(trained)
        return found


def _dataset(data: PreparedData, shape: RowShape, seed: int | None) -> EpochDataset:
    if shape.packing:
        return PackedDataset(data, shape.max_length, seed=seed)
    return SampleDataset(data, seed=seed)


def collator(
    shape: RowShape, *, with_source: bool
) -> PackingCollator | PaddingCollator | ImageCollator:
    """What makes samples, or the samples of packed rows, a batch."""
    padding, multiple = shape.pad_token_id, shape.multiple
    found: PackingCollator | PaddingCollator
    if shape.packing:
        found = PackingCollator(
            shape.max_length, padding, with_source=with_source, pad_to_multiple_of=multiple
        )
    else:
        found = PaddingCollator(padding, with_source=with_source, pad_to_multiple_of=multiple)
    return ImageCollator(found, shape.vision) if isinstance(shape.vision, Vision) else found


SFT = Objective(
    name="sft",
    format=None,
    packs=True,
    streams=True,
    dataset=_dataset,
    collator=lambda shape: collator(shape, with_source=bool(shape.sources)),
    loss=TokenMeanLoss,
    splits_rows=True,
    takes_images=True,
)
