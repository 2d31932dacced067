"""A preference objective as somebody would add one: a format of pairs, one file, one row.

Odds of the chosen answer over the rejected one, without a reference model: for each pair
-log sigmoid(BETA * (log p(chosen) - log p(rejected))), and their mean.
"""

from dataclasses import replace

import numpy as np
import torch
from torch.nn.functional import logsigmoid

from trainkit.data import fields
from trainkit.data.collator import PaddingCollator
from trainkit.data.fields import TALK
from trainkit.data.formats import parse_turn
from trainkit.data.messages import Comparison, Conversation
from trainkit.errors import RecipeError
from trainkit.models.loss import token_losses
from trainkit.objectives.objective import EvaluatedBatch, Objective
from trainkit.options.data import IGNORE_INDEX

BETA = 0.5


def parse_pairs(row):
    """``chosen`` and ``rejected``: the same turns but for the last one, which is trained."""
    return Comparison(tuple(_answer(row, key) for key in ("chosen", "rejected")))


def _answer(row, key):
    *turns, last = [parse_turn(item, n) for n, item in enumerate(fields.items(row, key), 1)]
    return Conversation((*(replace(turn, train=False) for turn in turns), last))


READS = ("chosen", "rejected", *TALK)


class Pairs:
    """Items of two samples; the samples of a row are neighbours in the store."""

    def __init__(self, data, seed):
        self.data, self.seed = data, seed
        self.is_first = np.concatenate([part.store.part for part in data.parts]) == 0
        self.set_epoch(0)

    def set_epoch(self, epoch):
        order = np.arange(len(self.data))
        if self.seed is not None:
            order = self.data.epoch_order(seed=self.seed, epoch=epoch)
        self.order = order[self.is_first[order]]

    @property
    def lengths(self):
        return self.data.lengths[self.order] + self.data.lengths[self.order + 1]

    def __len__(self):
        return len(self.order)

    def __getitem__(self, place):
        first = int(self.order[place])
        return [self.data[first], self.data[first + 1]]


class Margins:
    """How far apart the answers are, and how often the chosen one is ahead."""

    sums = None

    def add(self, margins):
        batch = torch.stack(
            (margins.sum(), (margins > 0).sum(), torch.tensor(len(margins)))
        ).double()
        self.sums = batch if self.sums is None else self.sums + batch

    def take(self, device):
        sums, self.sums = self.sums, None
        return torch.zeros(3, dtype=torch.float64, device=device) if sums is None else sums

    def rows(self, sums, prefix=""):
        margin, ahead, count = sums
        return {f"{prefix}margin": margin / count, f"{prefix}pair_accuracy": ahead / count}


class PairLoss:
    def __init__(self, setup):
        if setup.label_smoothing:
            raise RecipeError(
                "pairs have no smoothed labels", where="training.label_smoothing_factor"
            )
        self.train_metrics, self.eval_metrics = Margins(), Margins()

    def num_items(self, batch, num_trained_tokens):
        return int(_is_real(batch["labels"]).sum())

    def training(self, model, inputs, step):
        return step.share(self._loss_sum(model, inputs, self.train_metrics)), None

    def evaluate(self, model, inputs, num_items):
        return EvaluatedBatch(self._loss_sum(model, inputs, self.eval_metrics))

    def _loss_sum(self, model, inputs, metrics):
        scores = -token_losses(model, inputs).sum(1)
        is_real = _is_real(inputs["labels"])
        margins = (scores[0::2] - scores[1::2])[is_real]
        metrics.add(margins.detach())
        return -logsigmoid(BETA * margins).sum() + 0 * scores.sum()


def _is_real(labels):
    """Which pairs count: the loader fills up with pairs of which nothing is trained."""
    return (labels[:, 1:] != IGNORE_INDEX).any(1)[0::2]


def _collator(shape):
    pad = PaddingCollator(shape.pad_token_id)
    return lambda pairs: pad([sample for pair in pairs for sample in pair])


PREFERENCE = Objective(
    name="preference",
    format="pairs",
    packs=False,
    streams=False,
    dataset=lambda data, shape, seed: Pairs(data, seed),
    collator=_collator,
    loss=PairLoss,
)
