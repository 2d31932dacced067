"""Learning from pairs of answers: DPO with its relatives, ORPO, SimPO.

Everything is a function of the answers' log-probabilities, summed over their tokens.

A answers, twice the pairs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from trainkit.objectives.answers import AnswerLoss, answer_objective
from trainkit.options import PreferenceOptions
from trainkit.options.data import IGNORE_INDEX
from trainkit.options.training import DEFAULT_BETA, SIMPO_BETA

# -- The losses of pairs --------------------------------------------------------------------------


def dpo_losses(chosen: Tensor, rejected: Tensor, options: PreferenceOptions) -> Tensor:
    """Each pair's loss.

    Where that is wanted, the ratios are divided by the answers' tokens already.
    """
    beta, wrong = float(options.beta or DEFAULT_BETA), options.label_smoothing
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


# -- On a model -----------------------------------------------------------------------------------

SATURATED = 5.0
"""Beyond such a margin of rewards a pair has hardly a gradient any more."""

PAIR_FIGURES = (
    *("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"),
    *("logps/chosen", "logps/rejected", "logps/chosen_per_token", "logps/rejected_per_token"),
    *("rewards/ties", "rewards/saturated", "rewards/accuracies_when_shorter"),
    *("lengths/chosen", "lengths/rejected"),
)
"""Means over pairs, by TRL's names as far as it has them."""

CHANGES = ("logps/chosen_change", "logps/rejected_change")
"""How much more likely the answers became than they were to the reference, a token."""


def reward_figures(rewards: Tensor, lengths: Tensor, is_real: Tensor) -> dict[str, Any]:
    """What rewards (pairs, 2) of a better and a worse answer, of so many tokens, come to."""
    better, worse = rewards.unbind(1)
    is_right, is_shorter = better > worse, lengths[:, 0] < lengths[:, 1]
    return {
        "rewards/chosen": (better, is_real),
        "rewards/rejected": (worse, is_real),
        "rewards/margins": (better - worse, is_real),
        "rewards/accuracies": (is_right, is_real),
        "rewards/ties": (better == worse, is_real),
        "rewards/saturated": ((better - worse).abs() > SATURATED, is_real),
        "rewards/accuracies_when_shorter": (is_right, is_real & is_shorter),
        "lengths/chosen": (lengths[:, 0], is_real),
        "lengths/rejected": (lengths[:, 1], is_real),
    }


def token_means(sums: Tensor, lengths: Tensor, is_real: Tensor) -> tuple[Tensor, Tensor]:
    """A figure that is the mean over all tokens of answers (pairs,)."""
    return torch.where(is_real, sums, 0).sum(), torch.where(is_real, lengths, 0).sum()


class PairLoss(AnswerLoss):
    """Of pairs: the better answer of each comes before the worse one."""

    together = 2
    figures: Sequence[str] = PAIR_FIGURES

    def compare(
        self, sums: Tensor, reference: Tensor | None, lengths: Tensor, is_real: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        sums, lengths = sums.view(-1, 2), lengths.view(-1, 2)
        before = None if reference is None else reference.view(-1, 2)
        rewards, losses = self.rewarded(sums, before, lengths, is_real)
        if self.options.sft_weight:
            losses = losses - self.options.sft_weight * sums[:, 0] / lengths[:, 0]
        found = reward_figures(rewards, lengths, is_real)
        for side, name in enumerate(("chosen", "rejected")):
            taken = sums[:, side], lengths[:, side], is_real
            found[f"logps/{name}"] = (sums[:, side], is_real)
            found[f"logps/{name}_per_token"] = token_means(*taken)
            if before is not None:
                found[f"logps/{name}_change"] = token_means(taken[0] - before[:, side], *taken[1:])
        return losses, found

    def rewarded(
        self, sums: Tensor, reference: Tensor | None, lengths: Tensor, is_real: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The answers' rewards (pairs, 2), and each pair's loss; all given are (pairs, 2)."""
        raise NotImplementedError


class DpoLoss(PairLoss):
    """Against the model before training."""

    has_reference = True
    figures = (*PAIR_FIGURES, *CHANGES)

    def rewarded(
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

    _prompts: tuple[Tensor, Tensor] | None = None
    """(pairs,) log-probabilities of the better answers' prompts and their tokens, if they train."""

    def num_items(self, batch: dict[str, Any], num_trained_tokens: int) -> int:
        """As before, with the prompts of better answers as answers of their own, behind all."""
        found = super().num_items(batch, num_trained_tokens)
        if self.options.sft_prompt:
            ids, labels = batch["answer_ids"], batch["labels"]
            starts = ids != torch.roll(ids, 1, 1)  # which nothing before predicts
            starts[:, 0] = True
            prompts = (ids >= 0) & (ids % 2 == 0) & (labels == IGNORE_INDEX) & ~starts
            batch["labels"] = torch.where(prompts, batch["input_ids"], labels)
            predicts = torch.roll(prompts, -1, 1)  # a token belongs to whom the next one does
            batch["answer_ids"] = torch.where(predicts, batch["num_answers"] + ids // 2, ids)
            batch["num_trained_tokens"] += int(prompts.sum())
            batch["num_answers"] += batch["num_answers"] // 2
        return found

    def answers(self, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """As before, without the prompts, which are kept for the loss."""
        sums, lengths = super().answers(model, inputs)
        num = len(sums) * 2 // 3 if self.options.sft_prompt else len(sums)
        self._prompts = sums[num:], lengths[num:]
        return sums[:num], lengths[:num]

    def rewarded(
        self, sums: Tensor, reference: Tensor | None, lengths: Tensor, is_real: Tensor
    ) -> tuple[Tensor, Tensor]:
        means = torch.where(is_real[:, None], sums / lengths, -1.0)
        odds = log_odds(means[:, 0]) - log_odds(means[:, 1])
        learnt = means[:, 0]
        if self.options.sft_prompt and self._prompts is not None:
            (prompts, tokens), self._prompts = self._prompts, None
            learnt = (sums[:, 0] + prompts) / (lengths[:, 0] + tokens)
        return self.beta * means, -learnt - self.beta * logsigmoid(odds)


class SimpoLoss(PairLoss):
    """Each pair: how far the mean log-probabilities are apart, beyond a margin."""

    default_beta = SIMPO_BETA

    def rewarded(
        self, sums: Tensor, reference: Tensor | None, lengths: Tensor, is_real: Tensor
    ) -> tuple[Tensor, Tensor]:
        rewards = self.beta * sums / lengths
        return rewards, -logsigmoid(rewards[:, 0] - rewards[:, 1] - self.options.gamma)


DPO = answer_objective("dpo", DpoLoss, together=2)
ORPO = answer_objective("orpo", OrpoLoss, together=2)
SIMPO = answer_objective("simpo", SimpoLoss, together=2)
