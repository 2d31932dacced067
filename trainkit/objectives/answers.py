"""What losses of whole answers share: log-probabilities summed over an answer, items, figures.

The mean is over the items of the whole step, a pair or an answer each, so it does not matter how
these are cut into micro-batches and ranks, packed or padded. A reference model is the same model
with its adapters switched off, or a second one, on the same batch; or its numbers were computed
before training and come with the samples (`trainkit.train.reference`).

A answers, B batch, S sequence.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor, nn

from trainkit.data.datasets import PreparedData, pack
from trainkit.evaluation_mode import evaluation_mode
from trainkit.models.loss import LossOptions, configure, token_losses
from trainkit.objectives.objective import EvaluatedBatch, LossSetup, Objective, RowShape, Step, Sums
from trainkit.objectives.sft import collator
from trainkit.options import PreferenceOptions
from trainkit.options.data import IGNORE_INDEX
from trainkit.options.training import DEFAULT_BETA, OBJECTIVE_FORMATS
from trainkit.parallel.rows import next_tokens

REFERENCE = "reference"
"""The key of samples and batches for what the reference model has said of them."""

# -- Figures --------------------------------------------------------------------------------------

_NORMAL = 1.959963984540054
"""Of a 95% interval."""


class Ratios(Sums):
    """Figures that are a sum over a count, such as means: each figure's sum next to its count."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.shape = (len(self.names), 2)

    @torch.no_grad()
    def add(self, figures: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Add a batch: of each figure the values, and which of them count."""
        columns = []
        for name in self.names:
            values, counts = (each.double() for each in figures[name])
            columns.append(torch.stack((torch.where(counts > 0, values, 0).sum(), counts.sum())))
        self.put(torch.stack(columns).detach())

    def rows(self, sums: Sequence[float], prefix: str = "") -> dict[str, float]:
        """The figures that came up; of an evaluation's accuracies also a 95% interval."""
        found = {}
        pairs = zip(sums[::2], sums[1::2], strict=True)
        for name, (total, count) in zip(self.names, pairs, strict=True):
            if count:
                found[f"{prefix}{name}"] = total / count
                if prefix and "accuracies" in name:
                    low, high = wilson(total, count)
                    found |= {f"{prefix}{name}_low": low, f"{prefix}{name}_high": high}
        return found


def wilson(right: float, count: float) -> tuple[float, float]:
    """The 95% interval of a share, by Wilson: it stays within 0 and 1 at any size."""
    share, square = right / count, _NORMAL**2
    middle = (share + square / (2 * count)) / (1 + square / count)
    inner = share * (1 - share) / count + square / (4 * count**2)
    half = _NORMAL * inner**0.5 / (1 + square / count)
    return max(middle - half, 0.0), min(middle + half, 1.0)


# -- On a model -----------------------------------------------------------------------------------


class AnswerLoss:
    """The mean loss of the items of a step."""

    together = 1
    default_beta = DEFAULT_BETA
    ratios = Ratios
    figures: Sequence[str] = ()
    has_reference = False
    reads_stored = False
    """The samples come with the reference; a batch without it is a fault."""

    def __init__(self, setup: LossSetup) -> None:
        options = setup.preference or PreferenceOptions()
        self.options = options.replace(beta=options.beta or self.default_beta)
        self.beta = float(self.options.beta or self.default_beta)
        self.model, self.second_model = setup.model, setup.teacher
        for model in filter(None, (self.model, self.second_model)):
            configure(model, LossOptions(chunk_tokens=setup.chunk_tokens))
        self.train_metrics, self.eval_metrics = (self.ratios(self.figures) for _ in range(2))

    def num_items(self, batch: dict[str, Any], num_trained_tokens: int) -> int:
        """Items all of whose answers have a token that counts."""
        ids, together = batch["answer_ids"], self.together
        batch["num_trained_tokens"] = num_trained_tokens
        batch["num_answers"] = num = (int(ids.max()) // together + 1) * together
        found = torch.bincount(ids[batch["labels"] != IGNORE_INDEX], minlength=num)
        return int((found.view(-1, together) > 0).all(1).sum())

    def training(self, model: nn.Module, inputs: dict[str, Any], step: Step) -> tuple[Tensor, Any]:
        """A micro-batch's part of the step's mean."""
        return step.share(self.loss_sum(model, inputs, self.train_metrics)), None

    def evaluate(self, model: nn.Module, inputs: dict[str, Any], num_items: int) -> EvaluatedBatch:
        return EvaluatedBatch(self.loss_sum(model, inputs, self.eval_metrics))

    def loss_sum(self, model: nn.Module, inputs: dict[str, Any], figures: Ratios) -> Tensor:
        """The sum of the losses of a batch's items; what they come to is added to the figures."""
        stored = inputs.pop(REFERENCE, None)
        if stored is None and self.reads_stored:
            raise RuntimeError("a batch came without what the reference model has said of it")
        reference = stored
        if stored is None and self.has_reference:
            reference = self.reference(model, inputs)
        sums, lengths = self.answers(model, inputs)
        # The loader fills batches up with samples without a token.
        is_real = (lengths.view(-1, self.together) > 0).all(1)
        losses, found = self.compare(sums, reference, lengths.clamp(min=1), is_real)
        figures.add(found)
        return torch.where(is_real, losses, 0).sum() + 0 * sums.sum()

    def answers(self, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """(A,) log-probabilities of the answers, and their tokens."""
        return answer_sums(model, inputs)

    def reference(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """(A, columns) of the same batch without adapters, dropout and gradients."""
        model = model if self.second_model is None else self.second_model
        with torch.no_grad(), evaluation_mode(model), adapters_off(self.model):
            return self.scores(model, inputs)

    def scores(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """(A, columns): all that a loss asks its reference model."""
        return answer_sums(model, inputs)[0][:, None]

    def compare(
        self, sums: Tensor, reference: Tensor | None, lengths: Tensor, is_real: Tensor
    ) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """Each item's loss, and the figures.

        Of items that are not real the losses may be any finite number.

        Args:
            sums: (A,) log-probabilities of the answers.
            reference: (A, columns), what `scores` was before training; None without one.
            lengths: (A,) tokens.
            is_real: (items,); the others' losses may be any finite number.
        """
        raise NotImplementedError


def answer_sums(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """(A,) log-probabilities of a batch's answers, fp64 sums over their tokens; their tokens."""
    given = dict(inputs)
    ids, num_answers = given.pop("answer_ids"), given.pop("num_answers")
    targets = next_tokens(given["labels"], IGNORE_INDEX)
    answers = torch.arange(num_answers, device=ids.device)[:, None, None]
    belongs = (ids == answers) & (targets != IGNORE_INDEX)
    # A masked sum, not an index_add: the order of its additions is always the same.
    losses = torch.where(belongs, token_losses(model, given), 0)
    return -losses.sum((1, 2), dtype=torch.float64), belongs.sum((1, 2))


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within, the model is its base; peft forgets which weights were trained, so they are noted."""
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        with model.disable_adapter() if isinstance(model, PeftModel) else nullcontext():
            yield
    finally:
        for parameter, was in trained:
            parameter.requires_grad_(was)


# -- Data -----------------------------------------------------------------------------------------

OTHER = "other_"
"""Of the keys of a second set of rows in a batch."""


class AnswerDataset:
    """Items are the samples that belong together, or those of a packed row; they are never split.

    The samples of a row of the file are neighbours, ``together`` an item; without a seed they keep
    the order of the files.

    Attributes:
        reference: (N, columns) what the reference model says of each sample; None where nobody has
            asked it.
        shared: (N,) tokens that a sample comes without: the one before it begins with them.
    """

    def __init__(
        self, data: PreparedData, shape: RowShape, seed: int | None, together: int = 1
    ) -> None:
        self.data, self.shape, self.seed, self.together = data, shape, seed, together
        self.reference: np.ndarray | None = None
        parts = [part.of(part.store.part) for part in data.parts]
        self._is_first = np.concatenate([np.empty(0, dtype=np.int64), *parts]) % together == 0
        self.shared = np.zeros(len(data), dtype=np.int64)
        if shape.shares_prompts:
            for first in self.firsts:
                self.shared[first + 1] = num_shared(data[first], data[first + 1])
        self.sizes = data.lengths - self.shared
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Take the order of an epoch, and pack again."""
        order = self.data.epoch_order(seed=self.seed, epoch=epoch)
        self.take(order[self._is_first[order]], epoch)

    def take(self, first: np.ndarray, epoch: int = 0) -> None:
        """Have these items, each named by its first sample, as rows."""
        self.rows: Sequence[np.ndarray] = list(first[:, None])
        if self.shape.packing:
            sizes = sum(self.sizes[first + side] for side in range(self.together))
            packed = pack(
                np.asarray(sizes), self.shape.max_length, seed=self.seed or 0, epoch=epoch
            )
            self.rows = [first[row] for row in packed]

    @property
    def firsts(self) -> np.ndarray:
        """The first sample of each item, in the order of the files."""
        return np.flatnonzero(self._is_first)

    @property
    def lengths(self) -> np.ndarray:
        sizes = [
            sum(int(self.sizes[row + side].sum()) for side in range(self.together))
            for row in self.rows
        ]
        return np.array(sizes, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> list[dict[str, Any]]:
        places = itertools.product(self.rows[index], range(self.together))
        return [self.sample(int(first) + side) for first, side in places]

    def sample(self, index: int) -> dict[str, Any]:
        found = self.data[index]
        if first := int(self.shared[index]):
            found |= {name: found[name][first:] for name in ("input_ids", "loss_mask")}
            found["shared"] = first
        return found if self.reference is None else {**found, REFERENCE: self.reference[index]}

    def scored(self, index: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """The token ids and masks of what the reference is asked of a sample, a column each."""
        sample = self.data[index]
        return [(sample["input_ids"], sample["loss_mask"])]


def num_shared(first: Mapping[str, Any], second: Mapping[str, Any]) -> int:
    """First tokens that two samples have in common, up to where the first is scored.

    The last of them is not among these: each answer has its own, which predicts its first token.
    """
    ids = [each["input_ids"] for each in (first, second)]
    most = min(len(each) for each in ids)
    differs = np.flatnonzero(ids[0][:most] != ids[1][:most])
    ends = [np.flatnonzero(each["loss_mask"]) for each in (first, second)]
    return max(min([most, *(int(each[0]) for each in (differs, *ends) if len(each))]) - 1, 0)


def answer_collator(shape: RowShape) -> Callable[[Sequence[Any]], dict[str, Any]]:
    """Batches with ``answer_ids`` (B, S): which answer of the batch a token is of, -1 in padding.

    Answers are numbered in the order of the samples.
    """
    collate = collator(shape, with_source=True)

    def answers(items: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
        numbers = itertools.count()
        rows: list[Any] = [
            [{**sample, "source": next(numbers)} for sample in item] for item in items
        ]
        flat = [sample for row in rows for sample in row]
        batch = collate(rows if shape.packing else flat)
        batch["answer_ids"] = batch.pop("source_ids")
        if all(REFERENCE in sample for sample in flat):
            stored = np.stack([sample[REFERENCE] for sample in flat])
            batch[REFERENCE] = torch.from_numpy(stored)
        return batch

    return answers


def answer_objective(
    name: str,
    loss: Callable[[LossSetup], AnswerLoss],
    *,
    together: int = 1,
    scalar_head: bool = False,
) -> Objective:
    def dataset(data: PreparedData, shape: RowShape, seed: int | None) -> AnswerDataset:
        return AnswerDataset(data, shape, seed, together)

    return Objective(
        name=name,
        format=OBJECTIVE_FORMATS[name],
        packs=True,
        streams=False,
        dataset=dataset,
        collator=answer_collator,
        loss=loss,
        num_together=together,
        scalar_head=scalar_head,
    )
