"""What routers do: their own loss, and how much each expert of a layer is given.

Counted on the device while batches go by, over tokens that are no padding. E experts of a layer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.models.linears import expert_parameters
from trainkit.options.data import IGNORE_INDEX
from trainkit.parallel.rows import next_tokens

_LAYER = re.compile(r"\.(\d+)\.")


class Routing:
    """The routers' loss and the loads of experts since the last `take`.

    Attributes:
        sums: float64: the loss and its weight, then how many tokens each expert of each layer got.
        layers: the names of the layers, and how many experts they have.
        reached: by a layer's name, how many tokens with a target each expert got in all; kept until
            somebody has emptied it and set it to None.
    """

    def __init__(self, model: nn.Module) -> None:
        names = {id(each): name for name, each in model.named_modules()}
        modules = dict(model.named_modules())
        self.layers: dict[str, int] = {}
        for full, parameter in expert_parameters(model).items():
            name = full.rpartition(".")[0]
            number = parameter.shape[0] if parameter.dim() == 3 else int(modules[name].num_experts)
            while getattr(modules.get(name.rpartition(".")[0]), "parameter_name", None):
                name = name.rpartition(".")[0]  # the outermost wrapper runs, whatever is in it
            if name not in self.layers:
                self.layers[name] = number
                modules[name].register_forward_pre_hook(self._count, with_kwargs=True)
        self._names = names
        self._places: dict[str, slice] = {}  # of a layer's counts among the sums
        end = 2
        for name, number in self.layers.items():
            self._places[name] = slice(end, end + number)
            end += number
        self.shape = (end,)
        self.sums: Tensor | None = None
        self.reached: dict[str, Tensor] | None = {}
        self._real: Tensor | None = None
        self._aimed: Tensor | None = None

    def begin(self, inputs: dict[str, Any]) -> None:
        """These tokens go through the model now."""
        labels, ids = inputs.get("labels"), inputs["input_ids"]
        targets = inputs.get("shift_labels")
        if targets is None and labels is not None:
            targets = next_tokens(labels, IGNORE_INDEX)
        self._aimed = None if targets is None else (targets != IGNORE_INDEX).flatten()
        mask = inputs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape == ids.shape:
            self._real = mask.flatten() != 0
        else:
            self._real = ~_tails(ids, inputs.get("position_ids"), targets).flatten()

    def add_loss(self, loss: Tensor, weight: Tensor | float) -> None:
        """A part of a step's routers' loss."""
        sums = self._made(loss.device)
        sums[0] += loss.detach().double() * weight
        sums[1] += weight

    @torch.no_grad()
    def _count(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        real, aimed = self._real, self._aimed
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        if torch.compiler.is_compiling() or real is None or not module.training or not given:
            return
        name = self._names[id(module)]
        number = self.layers[name]
        index = next((each for each in given if not each.is_floating_point()), None)
        if index is None and len(given[0]) == number * len(real):  # rows sorted by expert
            got = (given[0].view(number, len(real), -1) != 0).any(-1).double()
            share = got @ real.double()
            trained = None if aimed is None else got @ aimed.double()
        elif index is not None and index.shape[0] == len(real):
            flat = index.flatten().clamp(0, number)  # the last for those sent nowhere
            share = _counts(flat, real, number)
            trained = None if aimed is None else _counts(flat, aimed, number)
        else:  # a part of the tokens
            return
        self._made(share.device)[self._places[name]] += share
        if self.reached is not None and trained is not None:
            self.reached[name] = trained + self.reached.get(name, 0.0)

    def _made(self, device: torch.device) -> Tensor:
        if self.sums is None:
            self.sums = torch.zeros(self.shape, dtype=torch.float64, device=device)
        return self.sums

    def rows(self, sums: Sequence[float]) -> dict[str, float]:
        """The routers' loss; of each layer the largest share of an expert, and three more figures.

        Those are the loads' standard deviation over their mean, how many experts got nothing, and
        the entropy over that of equal shares.
        """
        found: dict[str, float] = {}
        if sums[1]:
            found["router_loss"] = sums[0] / sums[1]
        for name, size in self.layers.items():
            loads = torch.tensor(list(sums[self._places[name]]), dtype=torch.float64)
            if not loads.any():
                continue
            number = _LAYER.search(name)
            shares, layer = loads / loads.sum(), number[1] if number else name
            entropy = torch.special.entr(shares).sum() / torch.log(torch.tensor(float(size)))
            for key, value in (
                ("largest_share", shares.max()),
                ("load_cv", loads.std(correction=0) / loads.mean()),
                ("dead", (loads == 0).sum()),
                ("entropy", entropy),
            ):
                found[f"experts_{key}/{layer}"] = round(float(value), 4)
        return found


def _counts(index: Tensor, chosen: Tensor, number: int) -> Tensor:
    """How often each number below ``number`` is in index (T K), of the tokens that are chosen."""
    weights = chosen.double().repeat_interleave(len(index) // len(chosen))
    return weights.new_zeros(number + 1).scatter_add_(0, index, weights)[:number]


def _tails(ids: Tensor, positions: Tensor | None, targets: Tensor | None) -> Tensor:
    """The tails that fill packed rows: of one token over and over, and nothing of it trained."""
    if positions is None or positions.shape != ids.shape:
        return torch.zeros_like(ids, dtype=torch.bool)
    segment = (positions == 0).cumsum(1)
    last = segment == segment[:, -1:]
    other = ids != ids[:, -1:]
    if targets is not None:
        other = other | (targets != IGNORE_INDEX)
    return last & ~(last & other).any(1, keepdim=True)


class Together:
    """Several figures as one."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts
        self._sizes = [int(torch.Size(each.shape).numel()) for each in parts]

    @property
    def sums(self) -> Tensor | None:
        """Of all, flat; None before a batch."""
        like = next((each.sums for each in self.parts if each.sums is not None), None)
        if like is None:
            return None
        return torch.cat(
            [
                like.new_zeros(size) if each.sums is None else each.sums.flatten()
                for each, size in zip(self.parts, self._sizes, strict=True)
            ]
        )

    @sums.setter
    def sums(self, values: Tensor | None) -> None:
        given = [None] * len(self.parts) if values is None else values.split(self._sizes)
        for each, mine in zip(self.parts, given, strict=True):
            each.sums = None if mine is None else mine.reshape(each.shape).clone()

    def take(self, device: torch.device) -> Tensor:
        """The sums since the last call, flat; zeros if there was no batch."""
        sums, self.sums = self.sums, None
        return (
            torch.zeros(sum(self._sizes), dtype=torch.float64, device=device)
            if sums is None
            else sums
        )

    def rows(self, sums: Sequence[float], prefix: str = "") -> dict[str, float]:
        """What the log says of each."""
        found: dict[str, float] = {}
        for each, size in zip(self.parts, self._sizes, strict=True):
            mine, sums = sums[:size], sums[size:]
            found |= each.rows(mine, prefix) if prefix else each.rows(mine)
        return found
