"""What a micro-batch's loss counts for: one denominator for every model class.

A step's loss is the sum over its trained tokens, divided by their number over all micro-batches and
ranks. Most classes divide by the number that Trainer gives them. Some (``accepts_loss_kwargs =
False``: gemma4, gemma3n and others) return the mean of their own micro-batch, and a router's
auxiliary loss is a mean over whatever it is given; both get their right weight here. The
evaluation takes the same parts, so both losses are the same quantity.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers.trainer_pt_utils import LabelSmoother

from trainkit.models.loss.loss_head import (
    IGNORE_INDEX,
    LossOptions,
    configure,
    takes_loss_from_head,
)
from trainkit.objectives.objective import Step
from trainkit.parallel.rows import next_tokens


@dataclass(frozen=True)
class StepLoss:
    """How one model's losses are read.

    Attributes:
        takes_num_items: the model divides the sum of its tokens' losses by a given number; else it
            returns their mean.
        router_coefficient: what the router's auxiliary loss is multiplied with; 0 without one.
        smoother: smooths labels where the model returns logits; None where its own head does.
    """

    takes_num_items: bool
    router_coefficient: float
    smoother: LabelSmoother | None

    @property
    def smoothing(self) -> float:
        """Label smoothing, where losses are read from logits."""
        return 0.0 if self.smoother is None else self.smoother.epsilon

    @classmethod
    def of(cls, model: nn.Module, *, takes_num_items: bool, options: LossOptions) -> "StepLoss":
        """Read the model, and have its loss head smooth the labels where it has one."""
        label_smoothing = options.label_smoothing
        from_head = takes_loss_from_head(model)
        if from_head:
            configure(model, options)
        wants_logits = label_smoothing and not from_head
        smoother = LabelSmoother(epsilon=label_smoothing) if wants_logits else None
        return cls(takes_num_items, _router_coefficient(model), smoother)

    def share(
        self, loss: torch.Tensor, outputs: Any, step: Step, *, num_trained: int
    ) -> torch.Tensor:
        """A micro-batch's part of the step's loss, from what Trainer's ``compute_loss`` gives.

        Args:
            loss: 0-d. Divided by ``num_items`` and multiplied by ``num_ranks`` already where the
                model takes the number; the mean of the micro-batch where it does not.
            outputs: of the model.
            step: which part it is. Trainer divides by ``num_micro_batches`` where the model does
                not take ``num_items``.
            num_trained: trained tokens of this micro-batch.
        """
        router = self._router(outputs)
        if self.takes_num_items:
            surplus = step.num_ranks - 1 / step.num_micro_batches
            return loss if router is None or not surplus else loss - router * surplus
        if router is not None:
            loss = loss - router
        num_items = step.num_items
        weight = 0.0 if num_items is None else num_trained / num_items * step.num_ranks
        if not num_trained:  # the mean of nothing is NaN; its gradient is zero
            loss = loss.nan_to_num()
        total = loss * weight * step.num_micro_batches
        return total if router is None else total + router

    def smoothed(
        self, model: nn.Module, inputs: Mapping[str, Any], step: Step
    ) -> tuple[torch.Tensor, Any]:
        """As `share`, with smoothed labels and from logits; and the outputs of the model.

        Trainer's own way would leave the routers out, and the shift by one for some classes.
        """
        loss, router, outputs = self._from_logits(model, inputs, step.num_items)
        loss = loss * step.num_ranks
        if router is not None:
            loss = loss + router / step.num_micro_batches
        return (loss if self.takes_num_items else loss * step.num_micro_batches), outputs

    def _from_logits(
        self, model: nn.Module, inputs: Mapping[str, Any], num_items: torch.Tensor | int | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
        assert self.smoother is not None
        given = dict(inputs)
        labels = given.pop("labels")
        targets = given.pop("shift_labels", None)
        if targets is None:
            targets = next_tokens(labels, IGNORE_INDEX)
        outputs = model(**given)
        loss = self.smoother(outputs, targets, num_items_in_batch=num_items)
        return loss, self._router(outputs), outputs

    def parts(
        self, model: nn.Module, inputs: Mapping[str, Any], num_trained: int
    ) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
        """For an evaluation: the sum over this batch's tokens, the router's loss, the outputs."""
        one = torch.ones((), device=inputs["labels"].device)
        if self.smoother is not None:
            return self._from_logits(model, inputs, one)
        outputs = model(**inputs, **({"num_items_in_batch": one} if self.takes_num_items else {}))
        loss, router = outputs["loss"], self._router(outputs)
        if router is not None:
            loss = loss - router
        if not self.takes_num_items:
            loss = loss * num_trained if num_trained else torch.zeros_like(loss)
        return loss, router, outputs

    def _router(self, outputs: Any) -> torch.Tensor | None:
        """The router's part of a micro-batch's loss."""
        if not self.router_coefficient:
            return None
        auxiliary = outputs.get("aux_loss")
        return None if auxiliary is None else self.router_coefficient * auxiliary


def accepts_num_items(model: nn.Module) -> bool:
    """Whether a model's class divides by a number it is given, as transformers' Trainer decides."""
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    known = getattr(base, "accepts_loss_kwargs", None)
    if known is not None:
        return bool(known)
    kinds = [each.kind for each in inspect.signature(base.forward).parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds


def _router_coefficient(model: nn.Module) -> float:
    """The factor that the model's forward has for its routers' auxiliary loss."""
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    for holder in (base, base.config.get_text_config()):
        for name in ("router_aux_loss_coef", "aux_loss_coef"):
            value = getattr(holder, name, None)
            if isinstance(value, int | float):
                return float(value)
    return 0.0
