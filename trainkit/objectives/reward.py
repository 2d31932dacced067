"""A reward model: a number for each answer, higher for the better one of a pair (Bradley-Terry).

A answers, twice the pairs; B batch, S sequence.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from trainkit.models.scalar_head import LastStates
from trainkit.objectives.answers import AnswerLoss, Ratios, answer_objective
from trainkit.objectives.objective import LossSetup
from trainkit.objectives.preference import PAIR_FIGURES, reward_figures
from trainkit.options.data import IGNORE_INDEX


class RewardLoss(AnswerLoss):
    """Of each pair -log sigmoid of the difference of its rewards."""

    together = 2
    figures = tuple(name for name in PAIR_FIGURES if not name.startswith("logps/"))

    def __init__(self, setup: LossSetup) -> None:
        super().__init__(setup)
        self._states = LastStates(setup.model)

    def loss_sum(self, model: nn.Module, inputs: dict[str, Any], figures: Ratios) -> Tensor:
        given = dict(inputs)
        ids, num_answers, labels = map(given.pop, ("answer_ids", "num_answers", "labels"))
        given.pop("num_trained_tokens")
        answers = torch.arange(num_answers, device=ids.device)[:, None]
        belongs = ids.flatten() == answers
        places = torch.where(belongs, torch.arange(ids.numel(), device=ids.device), 0).amax(1)
        rewards = self._states.of(model, given, places).view(-1, 2)
        lengths = (belongs & (labels.flatten() != IGNORE_INDEX)).sum(1).view(-1, 2)
        is_real = (lengths > 0).all(1)
        losses = -logsigmoid(rewards[:, 0] - rewards[:, 1])
        losses = losses + self.options.center_rewards * rewards.sum(1).square()
        figures.add(reward_figures(rewards, lengths, is_real))
        return torch.where(is_real, losses, 0).sum()


REWARD = answer_objective("reward", RewardLoss, together=2, scalar_head=True)
