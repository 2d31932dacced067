"""Learning from pairs of answers: DPO with its relatives, ORPO, SimPO.

Everything is a function of the answers' log-probabilities, summed over their tokens; the figures
have TRL's names. The mean is over the pairs of the whole step, so it does not matter how these are
cut into micro-batches and ranks, packed or padded. The model that dpo compares with is the same
model with its adapters switched off, on the same batch.

A answers, twice the pairs; B batch, S sequence.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from trainkit.data.datasets import PreparedData, pack
from trainkit.errors import RecipeError
from trainkit.evaluation_mode import evaluation_mode
from trainkit.models.loss import LossOptions, configure, token_losses
from trainkit.objectives.objective import EvaluatedBatch, LossSetup, Objective, RowShape, Step
from trainkit.objectives.sft import collator
from trainkit.options import PreferenceOptions
from trainkit.options.data import IGNORE_INDEX
from trainkit.parallel.rows import next_tokens

# -- The losses of pairs --------------------------------------------------------------------------


def dpo_losses(chosen: Tensor, rejected: Tensor, options: PreferenceOptions) -> Tensor:
    """Each pair's loss.

    Args:
        chosen: (pairs,) log-ratios of the better answers to the reference model.
        rejected: those of the worse ones.
        options: ``beta`` is given. Both ratios are divided by the answers' tokens already where
            that is wanted.
    """
    beta, wrong = float(options.beta or 0.1), options.label_smoothing
    margin = beta * (chosen - rejected)
    if options.loss == "sigmoid":
        return -(1 - wrong) * logsigmoid(margin) - wrong * logsigmoid(-margin)
    if options.loss == "robust":
        both = (1 - wrong) * logsigmoid(margin) - wrong * logsigmoid(-margin)
        return -both / (1 - 2 * wrong)
    if options.loss == "hinge":
        return torch.relu(1 - margin)
    if options.loss == "ipo":
        return (chosen - rejected - 1 / (2 * beta)).square()
    if options.loss == "nca_pair":
        pulled = -logsigmoid(beta * chosen) - 0.5 * logsigmoid(-beta * chosen)
        return pulled - 0.5 * logsigmoid(-beta * rejected)
    if options.loss == "sppo_hard":
        return (chosen - 0.5 / beta).square() + (rejected + 0.5 / beta).square()
    if options.loss == "apo_zero":
        return 1 - torch.sigmoid(beta * chosen) + torch.sigmoid(beta * rejected)
    return torch.sigmoid(beta * chosen) + 1 - torch.sigmoid(margin)  # apo_down


def log_odds(mean: Tensor) -> Tensor:
    """log(p / (1 - p)) of p = exp(mean), exact for p near 0 and near 1."""
    mean = mean.clamp(max=-1e-12)
    near_one = mean > -0.6931471805599453
    low = torch.log1p(-torch.exp(torch.where(near_one, -1.0, mean)))
    high = torch.log(-torch.expm1(torch.where(near_one, mean, -1.0)))
    return mean - torch.where(near_one, high, low)


# -- Figures --------------------------------------------------------------------------------------

_FIGURES = (
    *("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"),
    *("logps/chosen", "logps/rejected"),
)
"""Means over pairs, by TRL's names."""

_PER_TOKEN = ("logps/chosen_per_token", "logps/rejected_per_token")


class PairFigures:
    """Rewards, margins, accuracy and log-probabilities of the pairs since the last `take`."""

    sums: Tensor | None = None

    def add(self, rewards: Tensor, sums: Tensor, lengths: Tensor, is_real: Tensor) -> None:
        """Add a batch.

        Args:
            rewards: (pairs, 2) of the better and the worse answer.
            sums: (pairs, 2) their log-probabilities.
            lengths: (pairs, 2) their tokens.
            is_real: (pairs,) which count.
        """
        better, worse = rewards.unbind(1)
        columns = (better, worse, better - worse, better > worse, *sums.unbind(1))
        columns = (*columns, *lengths.unbind(1), torch.ones_like(better))
        stacked = torch.stack([column.double() for column in columns])
        found = torch.where(is_real, stacked, 0).sum(1).detach()
        self.sums = found if self.sums is None else self.sums + found

    def take(self, device: torch.device) -> Tensor:
        """The sums since the last call."""
        sums, self.sums = self.sums, None
        size = len(_FIGURES) + len(_PER_TOKEN) + 1
        return torch.zeros(size, dtype=torch.float64, device=device) if sums is None else sums

    def rows(self, sums: Sequence[float], prefix: str = "") -> dict[str, float]:
        """The means; nothing where there was no pair."""
        *columns, count = sums
        if not count:
            return {}
        found = {
            f"{prefix}{name}": value / count for name, value in zip(_FIGURES, columns, strict=False)
        }
        tokens = columns[len(_FIGURES) :]
        for name, total, length in zip(_PER_TOKEN, columns[4:6], tokens, strict=True):
            found[f"{prefix}{name}"] = total / max(length, 1)
        return found


# -- On a model -----------------------------------------------------------------------------------


class PairLoss:
    """The mean loss of the pairs of a step."""

    default_beta = 0.1

    def __init__(self, setup: LossSetup) -> None:
        options = setup.preference or PreferenceOptions()
        self.options = options.replace(beta=options.beta or self.default_beta)
        self.beta = float(self.options.beta or self.default_beta)
        self.model = setup.model
        configure(setup.model, LossOptions(chunk_tokens=setup.chunk_tokens))
        self.train_metrics, self.eval_metrics = PairFigures(), PairFigures()

    def num_items(self, batch: dict[str, Any], num_trained_tokens: int) -> int:
        """Pairs of which both answers have a token that counts."""
        ids = batch["answer_ids"]
        batch["num_trained_tokens"] = num_trained_tokens
        batch["num_answers"] = num_answers = int(ids.max()) // 2 * 2 + 2
        found = torch.bincount(ids[batch["labels"] != IGNORE_INDEX], minlength=num_answers)
        return int((found.view(-1, 2) > 0).all(1).sum())

    def training(self, model: nn.Module, inputs: dict[str, Any], step: Step) -> tuple[Tensor, Any]:
        """A micro-batch's part of the step's mean."""
        return step.share(self._loss_sum(model, inputs, self.train_metrics)), None

    def evaluate(self, model: nn.Module, inputs: dict[str, Any], num_items: int) -> EvaluatedBatch:
        """The sum over the batch's pairs."""
        return EvaluatedBatch(self._loss_sum(model, inputs, self.eval_metrics))

    def _loss_sum(self, model: nn.Module, inputs: dict[str, Any], figures: PairFigures) -> Tensor:
        ids, num_answers = inputs.pop("answer_ids"), inputs.pop("num_answers")
        targets = next_tokens(inputs["labels"], IGNORE_INDEX)
        answers = torch.arange(num_answers, device=ids.device)[:, None, None]
        belongs = (ids == answers) & (targets != IGNORE_INDEX)
        lengths = belongs.sum((1, 2)).view(-1, 2)
        is_real = (lengths > 0).all(1)

        def log_probabilities() -> Tensor:
            # A masked sum, not an index_add: the order of its additions is always the same.
            losses = torch.where(belongs, token_losses(model, inputs), 0)
            return -losses.sum((1, 2), dtype=torch.float64).view(-1, 2)

        reference = self.reference(model, log_probabilities)
        sums = log_probabilities()
        # The loader fills batches up with pairs without a token.
        rewards, losses = self.compare(sums, reference, lengths.clamp(min=1), is_real)
        figures.add(rewards, sums, lengths, is_real)
        return torch.where(is_real, losses, 0).sum() + 0 * sums.sum()

    def reference(self, model: nn.Module, log_probabilities: Callable[[], Tensor]) -> Tensor | None:
        """(pairs, 2) of the model that is compared with; None where there is none."""
        return None

    def compare(
        self, sums: Tensor, reference: Tensor | None, lengths: Tensor, is_real: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The answers' rewards (pairs, 2), and each pair's loss.

        Args:
            sums: (pairs, 2) log-probabilities of the better and the worse answer.
            reference: what `reference` gave.
            lengths: (pairs, 2) tokens.
            is_real: (pairs,); the others' losses may be any finite number.
        """
        raise NotImplementedError


class DpoLoss(PairLoss):
    """Against the model without its adapters."""

    def __init__(self, setup: LossSetup) -> None:
        super().__init__(setup)
        if not isinstance(setup.model, PeftModel):
            raise RecipeError(
                "dpo needs adapters that can be switched off",
                where="objective",
                fix="add lora: {r: 16}, or set objective: simpo or orpo",
            )

    def reference(self, model: nn.Module, log_probabilities: Callable[[], Tensor]) -> Tensor:
        """The same batch without adapters, dropout and gradients."""
        with torch.no_grad(), evaluation_mode(model), _adapters_off(self.model):
            return log_probabilities()

    def compare(
        self, sums: Tensor, reference: Tensor | None, lengths: Tensor, is_real: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert reference is not None
        ratios = sums - reference
        if self.options.length_normalized or self.options.loss == "ipo":
            ratios = ratios / lengths
        chosen, rejected = ratios.unbind(1)
        return self.beta * ratios, dpo_losses(chosen, rejected, self.options)


class OrpoLoss(PairLoss):
    """Each pair: the better answer's mean cross entropy, and beta times the loss of the odds."""

    def compare(
        self, sums: Tensor, reference: Tensor | None, lengths: Tensor, is_real: Tensor
    ) -> tuple[Tensor, Tensor]:
        means = torch.where(is_real[:, None], sums / lengths, -1.0)
        odds = log_odds(means[:, 0]) - log_odds(means[:, 1])
        return self.beta * means, -means[:, 0] - self.beta * logsigmoid(odds)


class SimpoLoss(PairLoss):
    """Each pair: how far the mean log-probabilities are apart, beyond a margin."""

    default_beta = 2.0

    def compare(
        self, sums: Tensor, reference: Tensor | None, lengths: Tensor, is_real: Tensor
    ) -> tuple[Tensor, Tensor]:
        rewards = self.beta * sums / lengths
        return rewards, -logsigmoid(rewards[:, 0] - rewards[:, 1] - self.options.gamma)


@contextmanager
def _adapters_off(model: PeftModel) -> Iterator[None]:
    """Within, the model is its base; peft forgets which weights were trained, so they are noted."""
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        with model.disable_adapter():
            yield
    finally:
        for parameter, was in trained:
            parameter.requires_grad_(was)


# -- Data -----------------------------------------------------------------------------------------


class PairDataset:
    """Items are the samples of one pair, or of the pairs of a packed row; a pair is never split.

    Args:
        data: the samples of a row, its two answers, are neighbours.
        shape: of the rows.
        seed: of the mixture and the packing; None keeps the order of the files.
    """

    def __init__(self, data: PreparedData, shape: RowShape, seed: int | None) -> None:
        self.data, self.shape, self.seed = data, shape, seed
        parts = [part.of(part.store.part) for part in data.parts]
        self._is_first = np.concatenate([np.empty(0, dtype=np.int64), *parts]) == 0
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Take the order of an epoch, and pack again."""
        order = self.data.epoch_order(seed=self.seed, epoch=epoch)
        first, lengths = order[self._is_first[order]], self.data.lengths
        self.rows: Sequence[np.ndarray] = first[:, None]
        if self.shape.packing:
            sizes = lengths[first] + lengths[first + 1]
            packed = pack(sizes, self.shape.max_length, seed=self.seed or 0, epoch=epoch)
            self.rows = [first[row] for row in packed]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each item."""
        both = self.data.lengths[:-1] + self.data.lengths[1:]
        return np.array([int(both[row].sum()) for row in self.rows], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> list[dict[str, Any]]:
        return [self.data[int(first) + side] for first in self.rows[index] for side in (0, 1)]


def _collator(shape: RowShape) -> Callable[[Sequence[Any]], dict[str, Any]]:
    """Batches with ``answer_ids`` (B, S): which answer of the batch a token is of, -1 in padding.

    The better answer of each pair comes before the worse one.
    """
    collate = collator(shape, with_source=True)

    def pairs(items: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
        numbers = itertools.count()
        rows: list[Any] = [
            [{**sample, "source": next(numbers)} for sample in item] for item in items
        ]
        batch = collate(rows if shape.packing else [sample for row in rows for sample in row])
        batch["answer_ids"] = batch.pop("source_ids")
        return batch

    return pairs


def _objective(name: str, loss: Callable[[LossSetup], PairLoss]) -> Objective:
    return Objective(
        name=name,
        formats=frozenset(["preference"]),
        packs=True,
        streams=False,
        dataset=PairDataset,
        collator=_collator,
        loss=loss,
        num_together=2,
    )


DPO = _objective("dpo", DpoLoss)
ORPO = _objective("orpo", OrpoLoss)
SIMPO = _objective("simpo", SimpoLoss)
