"""KTO: answers that are good or bad by themselves, against the model before training.

The point that gains and losses are seen from is the mean log-ratio of answers that do not belong to
their prompts, over the whole step, without a gradient: it is measured ahead of the step's first
micro-batch, so that it does not matter how the step is cut. Which foreign answer a prompt gets is
decided by the data alone: the next sample, in a stable shuffle, with another prompt.

A answers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainkit.data.datasets import PreparedData
from trainkit.objectives.answers import (
    OTHER,
    REFERENCE,
    AnswerDataset,
    AnswerLoss,
    Ratios,
    answer_collator,
    answer_sums,
)
from trainkit.objectives.objective import LossSetup, Objective, RowShape
from trainkit.options.data import IGNORE_INDEX
from trainkit.options.training import OBJECTIVE_FORMATS

DESIRABLE = "desirable"
"""The key of a batch for which of its answers are good ones."""

_SIDES = ("chosen", "rejected")


class _Figures(Ratios):
    """With the distance between the two kinds' rewards, as TRL has it."""

    def rows(self, sums: Sequence[float], prefix: str = "") -> dict[str, float]:
        found = super().rows(sums, prefix)
        sides = [found.get(f"{prefix}rewards/{side}") for side in _SIDES]
        if sides[0] is not None and sides[1] is not None:
            found[f"{prefix}rewards/margins"] = sides[0] - sides[1]
        return found


class KtoLoss(AnswerLoss):
    """The mean over the answers of a step.

    Attributes:
        seen: (2,) the sum of log-ratios of the foreign answers of a step, and their number; None
            where nobody has looked ahead, as in a proof: then those of the batch count.
    """

    has_reference = True
    ratios = _Figures
    figures = (
        *(f"{name}/{side}" for name in ("rewards", "logps", "lengths") for side in _SIDES),
        *(f"logps/{side}{what}" for side in _SIDES for what in ("_per_token", "_change")),
        *("rewards/saturated", "kl"),
    )
    seen: Tensor | None = None

    def __init__(self, setup: LossSetup) -> None:
        super().__init__(setup)
        options = self.options
        self.weights = (options.desirable_weight, options.undesirable_weight)

    def num_items(self, batch: dict[str, Any], num_trained_tokens: int) -> int:
        """Answers with a token that counts."""
        found = super().num_items(batch, num_trained_tokens)
        batch[f"{OTHER}num_answers"] = batch["num_answers"]
        labels = batch.get(f"{OTHER}labels")
        if labels is not None:
            counted = torch.count_nonzero(labels[..., 1:] != IGNORE_INDEX)
            batch[f"{OTHER}num_trained_tokens"] = int(counted)
        return found

    def ahead(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """(2,) what a batch adds to `seen`; without gradients."""
        _, other = _divided(inputs)
        if "labels" not in other:  # a single row of a batch, in a replay
            return torch.zeros(2, dtype=torch.float64, device=inputs["labels"].device)
        with torch.no_grad():
            sums, lengths = answer_sums(model, other)
            stored = inputs.get(REFERENCE)
            before = self.reference(model, other) if stored is None else stored[:, 1:]
        is_real = lengths > 0
        return torch.stack((torch.where(is_real, sums - before[:, 0], 0).sum(), is_real.sum()))

    def loss_sum(self, model: nn.Module, inputs: dict[str, Any], figures: Ratios) -> Tensor:
        """As `AnswerLoss` has it, from the point that is looked from."""
        total, count = (self.ahead(model, inputs) if self.seen is None else self.seen).unbind()
        self._origin = (total / count.clamp(min=1)).clamp(min=0)
        self._is_good = inputs[DESIRABLE]
        own, _ = _divided(inputs)
        return super().loss_sum(model, own, figures)

    def scores(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        both = [part for part in _divided(inputs) if "labels" in part]
        return torch.stack([answer_sums(model, part)[0] for part in both], 1)

    def compare(
        self, sums: Tensor, reference: Tensor | None, lengths: Tensor, is_real: Tensor
    ) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        assert reference is not None
        is_good, origin = self._is_good, self._origin
        ratios = sums - reference[:, 0]
        gain = torch.where(is_good, ratios - origin, origin - ratios)
        good, bad = (sums.new_tensor(weight) for weight in self.weights)
        losses = torch.where(is_good, good, bad) * (1 - torch.sigmoid(self.beta * gain))
        found: dict[str, tuple[Tensor, Tensor]] = {
            "kl": (origin.expand_as(sums), is_real),
            "rewards/saturated": ((self.beta * gain).abs() > 5, is_real),
        }
        for side, kind in zip(_SIDES, (is_good, ~is_good), strict=True):
            mine = is_real & kind
            tokens = torch.where(mine, lengths, 0).sum()
            found[f"rewards/{side}"] = (self.beta * ratios, mine)
            found[f"logps/{side}"] = (sums, mine)
            found[f"lengths/{side}"] = (lengths, mine)
            for what, values in {"_per_token": sums, "_change": ratios}.items():
                found[f"logps/{side}{what}"] = (torch.where(mine, values, 0).sum(), tokens)
        return losses, found


def _divided(inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the answers are computed from, and the foreign ones."""
    other = {
        name.removeprefix(OTHER): value for name, value in inputs.items() if name.startswith(OTHER)
    }
    left_out = {DESIRABLE, *(OTHER + name for name in other)}
    return {name: value for name, value in inputs.items() if name not in left_out}, other


class RatedDataset(AnswerDataset):
    """Answers with their marks; each comes with the answer to another prompt."""

    def __init__(self, data: PreparedData, shape: RowShape, seed: int | None) -> None:
        super().__init__(data, shape, seed)
        empty: list[Any] = [np.empty(0, dtype=np.int64)]
        parts = np.concatenate([*empty, *(part.of(part.store.part) for part in data.parts)])
        self.is_desirable = parts == 0
        keys = [np.empty(0, dtype=np.uint64), *(part.share.keys for part in data.parts)]
        ring = np.argsort(np.concatenate(keys), kind="stable")
        prompts = [self._prompt(index).tobytes() for index in ring]
        self.partner = np.full(len(data), -1, dtype=np.int64)
        following = -1  # from the end twice around, the next of another prompt
        for place in range(2 * len(ring) - 1, -1, -1):
            here, after = place % len(ring), (place + 1) % len(ring)
            if prompts[after] != prompts[here]:
                following = int(ring[after])
            self.partner[ring[here]] = following

    def _prompt(self, index: int) -> np.ndarray:
        sample = self.data[index]
        scored = np.flatnonzero(sample["loss_mask"])
        ids: np.ndarray = sample["input_ids"][: scored[0] if len(scored) else None]
        return ids

    def sample(self, index: int) -> dict[str, Any]:
        """With its mark and the foreign answer."""
        found = super().sample(index)
        ids, mask = self._other(index, found)
        return {
            **found,
            DESIRABLE: bool(self.is_desirable[index]),
            "other": {"input_ids": ids, "loss_mask": mask, "id": None},
        }

    def _other(self, index: int, sample: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """This sample's prompt with another one's answer; no longer than a sample may be."""
        partner = int(self.partner[index])
        if partner < 0:  # all have the same prompt
            return sample["input_ids"], np.zeros_like(sample["loss_mask"])
        before, other = self._prompt(index), self.data[partner]
        start, most = len(self._prompt(partner)), self.shape.max_length
        ids = np.concatenate([before, other["input_ids"][start:]])[:most]
        nothing = np.zeros(len(before), dtype=other["loss_mask"].dtype)
        return ids, np.concatenate([nothing, other["loss_mask"][start:]])[:most]

    def scored(self, index: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """The answer, and the foreign one."""
        sample = self.data[index]
        return [(sample["input_ids"], sample["loss_mask"]), self._other(index, sample)]


def _collator(shape: RowShape) -> Callable[[Sequence[Any]], dict[str, Any]]:
    """The answers' batch, and that of the foreign ones next to it."""
    collate = answer_collator(shape)

    def others(item: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        for sample in item:
            other = sample["other"]
            if not sample["loss_mask"].any():  # one that only fills a batch
                other = {**other, "loss_mask": np.zeros_like(other["loss_mask"])}
            yield other

    def rated(items: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
        rows = [list(others(item)) for item in items]
        longest = max(sum(len(each["input_ids"]) for each in row) for row in rows)
        wide = answer_collator(replace(shape, max_length=-(-longest // 64) * 64))
        marks = [sample[DESIRABLE] for item in items for sample in item]
        return {
            **collate(items),
            DESIRABLE: torch.tensor(marks),
            **{OTHER + name: value for name, value in wide(rows).items()},
        }

    return rated


KTO = Objective(
    name="kto",
    format=OBJECTIVE_FORMATS["kto"],
    packs=True,
    streams=False,
    dataset=RatedDataset,
    collator=_collator,
    loss=KtoLoss,
    looks_ahead=True,
)
