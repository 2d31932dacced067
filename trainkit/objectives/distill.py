"""Distillation: at every trained token the next-token distribution is pulled to a teacher's.

The teacher is a second model on the same batch, or what it said is in the rows: the most likely
tokens at each place with their log-probabilities, everything else in one bucket. The mean is over
the trained tokens of the whole step, as in supervised fine-tuning.

N trained tokens of a batch, B batch, S sequence, V vocabulary, K stored tokens.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainkit.auto_class import without_adapters
from trainkit.errors import RecipeError
from trainkit.kernels.linear_cross_entropy.teacher import (
    DivergenceOptions,
    divergences,
    figures_of,
)
from trainkit.kernels.sums import sum_in_chunks
from trainkit.models.loss import head_of_teacher, takes_loss_from_head
from trainkit.objectives.answers import Ratios
from trainkit.objectives.objective import EvaluatedBatch, LossSetup, Objective, RowShape, Step
from trainkit.objectives.routing import Together
from trainkit.objectives.sft import SFT, collator
from trainkit.options import DistillOptions
from trainkit.options.data import IGNORE_INDEX
from trainkit.options.training import OBJECTIVE_FORMATS
from trainkit.parallel.rows import next_tokens

TEACHER_IDS, TEACHER_LOGPROBS = "teacher_ids", "teacher_logprobs"
"""The keys of rows, samples and batches for what a teacher has said."""

FIGURES = (
    *("distill/divergence", "distill/cross_entropy"),
    *("distill/agreement", "distill/teacher_entropy"),
)
"""Means over trained tokens: what is optimised, the labels' cross entropy, how often both models
find the same token the likeliest, and how much the teacher leaves open, in nats."""

DRAWN_FIGURES = ("on_policy/tokens", "on_policy/ended")
"""Of answers that the student draws: their tokens, and how often they end by themselves."""


_NOTHING = -30.0
"""The logarithm of what is left where the stored tokens have all of the mass."""


def _stored_with_rest(logprobs: Tensor) -> Tensor:
    """(N, K + 1): the stored tokens, and all others together in the last place."""
    rest = (1 - logprobs.double().exp().sum(-1, keepdim=True)).clamp(min=math.exp(_NOTHING)).log()
    return torch.cat((logprobs, rest.to(logprobs.dtype)), -1)


def _chosen_with_rest(logprobs: Tensor, ids: Tensor) -> Tensor:
    """The same of (N, V) and the stored tokens; the others' sum is exact, however small it is."""
    rest = logprobs.scatter(1, ids, -1e4).logsumexp(-1, keepdim=True).clamp(min=_NOTHING)
    return torch.cat((logprobs.gather(1, ids), rest), -1)


class DistillLoss:
    """The mean over the trained tokens of a step."""

    def __init__(self, setup: LossSetup) -> None:
        given, self.teacher = setup.distill or DistillOptions(), setup.teacher
        self.options = DivergenceOptions(
            given.divergence, given.jsd_share, given.temperature, given.sft_weight
        )
        self.figures, self.drawn = Ratios(FIGURES), Ratios(DRAWN_FIGURES)
        self.train_metrics, self.eval_metrics = (
            Together([self.figures, self.drawn]),
            Ratios(FIGURES),
        )

    def num_items(self, batch: dict[str, Any], num_trained_tokens: int) -> int:
        """Trained tokens."""
        batch["num_trained_tokens"] = num_trained_tokens
        return num_trained_tokens

    def training(self, model: nn.Module, inputs: dict[str, Any], step: Step) -> tuple[Tensor, Any]:
        """A micro-batch's part of the step's mean."""
        return step.share(self._loss_sum(model, inputs, self.figures)), None

    def evaluate(self, model: nn.Module, inputs: dict[str, Any], num_items: int) -> EvaluatedBatch:
        return EvaluatedBatch(self._loss_sum(model, inputs, self.eval_metrics))

    def _loss_sum(self, model: nn.Module, inputs: dict[str, Any], figures: Ratios) -> Tensor:
        given = dict(inputs)
        count = given.get("num_trained_tokens")
        stored = [given.pop(name, None) for name in (TEACHER_IDS, TEACHER_LOGPROBS)]
        teacher = self.teacher
        if stored[0] is not None:
            teacher = None
        elif teacher is None:
            raise RecipeError(
                "the teacher is not here: only a run has it at hand", where="distill.teacher"
            )
        if teacher is not None and all(map(takes_loss_from_head, (model, teacher))):
            theirs = head_of_teacher(teacher, given, self.options._asdict())
            loss, sums = model(**given, of_head={"teacher": theirs})["loss"]
        else:
            sums = self._sums(model, given, teacher, stored)
            loss, sums = self.options.loss(sums), sums.detach()
        if count is None:
            count = (next_tokens(inputs["labels"], IGNORE_INDEX) != IGNORE_INDEX).sum()
        trained = torch.as_tensor(count, device=sums.device)
        figures.add({name: (value, trained) for name, value in zip(FIGURES, sums, strict=True)})
        return loss

    def _sums(
        self,
        model: nn.Module,
        given: dict[str, Any],
        teacher: nn.Module | None,
        said: Sequence[Tensor],
    ) -> Tensor:
        """(4,) the sums of the figures over a batch, of logits."""
        given.pop("num_trained_tokens", None)
        targets = next_tokens(given.pop("labels"), IGNORE_INDEX)
        is_trained = targets != IGNORE_INDEX
        student = trained_logits(model, given, is_trained)
        if teacher is not None:
            with torch.no_grad():
                said = (trained_logits(teacher, given, is_trained),)
        chosen = targets.flatten()[is_trained.flatten().nonzero()[:, 0]]
        return sum_in_chunks(self._chunk, student.shape[1], (student, chosen, *said))

    def _chunk(self, student: Tensor, chosen: Tensor, *said: Tensor) -> Tensor:
        """(4,) the sums of the figures over some trained tokens."""
        if len(said) == 1:
            return figures_of(student, said[0], chosen, self.options).sum(0)
        ids, logs = said
        wide = torch.promote_types(student.dtype, torch.float32)
        plain = student.to(wide).log_softmax(-1)
        teacher, mine = _stored_with_rest(logs.to(wide)), _chosen_with_rest(plain, ids)
        figures = (
            divergences(mine, teacher, self.options),
            -plain.gather(-1, chosen[:, None]).squeeze(-1),
            (plain.detach().argmax(-1) == ids[:, 0]).to(wide),
            -(teacher.exp() * teacher).sum(-1),
        )
        return torch.stack([each.sum() for each in figures])


def trained_logits(model: nn.Module, inputs: Mapping[str, Any], is_trained: Tensor) -> Tensor:
    """(N, V): of the places in front of a trained token; of one row no others are computed."""
    base = without_adapters(getattr(model, "module", model))
    keeps = "logits_to_keep" in inspect.signature(base.forward).parameters
    if not keeps or len(is_trained) > 1:
        logits: Tensor = model(**inputs)["logits"]
        return logits.flatten(0, 1)[is_trained.flatten().nonzero()[:, 0]]
    places = is_trained[0].nonzero()[:, 0]
    if not len(places):  # a row that only fills a batch
        places = places.new_zeros(1)
        return model(**inputs, logits_to_keep=places)["logits"][0][:0]
    found: Tensor = model(**inputs, logits_to_keep=places)["logits"]
    return found[0]


# -- What a teacher has said before --------------------------------------------------------------


class ToldDataset:
    """The samples of another dataset, with what a teacher has said of each.

    Attributes:
        stored: index of a sample to token ids and log-probabilities, (trained tokens, K) each.
    """

    def __init__(self, samples: Any) -> None:
        self.samples, self.data = samples, samples.data
        self.stored: Mapping[int, tuple[np.ndarray, np.ndarray]] = {}

    @property
    def lengths(self) -> np.ndarray:
        found: np.ndarray = self.samples.lengths
        return found

    def set_epoch(self, epoch: int) -> None:
        self.samples.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        item = self.samples[index]
        return [self._with(each) for each in item] if isinstance(item, list) else self._with(item)

    def _with(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        if (said := self.stored.get(sample["id"])) is None:
            return dict(sample)
        return {**sample, TEACHER_IDS: said[0], TEACHER_LOGPROBS: said[1]}


def _told_collator(shape: RowShape) -> Callable[[Sequence[Any]], dict[str, Any]]:
    """Batches with (N, K) of what the teacher has said, in the order of the trained tokens."""
    collate = collator(shape, with_source=False)

    def stored(items: Sequence[Any]) -> dict[str, Any]:
        batch = collate(items)
        flat = [one for item in items for one in (item if isinstance(item, list) else [item])]
        said = [one for one in flat if one["loss_mask"].any() and TEACHER_IDS in one]
        for name in (TEACHER_IDS, TEACHER_LOGPROBS):
            if said:
                batch[name] = torch.from_numpy(np.concatenate([one[name] for one in said]))
            elif any(TEACHER_IDS in one for one in flat):
                empty = next(one[name] for one in flat if TEACHER_IDS in one)[:0]
                batch[name] = torch.from_numpy(empty)
        return batch

    return stored


DISTILL = Objective(
    name="distill",
    format=None,
    packs=True,
    streams=True,
    dataset=SFT.dataset,
    collator=lambda shape: collator(shape, with_source=False),
    loss=DistillLoss,
)

DISTILL_STORED = Objective(
    name="distill",
    format=OBJECTIVE_FORMATS["distill"],
    packs=True,
    streams=False,
    dataset=lambda data, shape, seed: ToldDataset(SFT.dataset(data, shape, seed)),
    collator=_told_collator,
    loss=DistillLoss,
)
"""Of a teacher that has spoken before."""
