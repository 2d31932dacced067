"""What routers do: their own loss, and how much each expert of a layer is given.

Counted on the device, over tokens that are no padding; all layers of a batch at once, since a
layer's few small kernels would take the host longer than the device. E experts of a layer.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.auto_class import without_adapters
from trainkit.errors import ModelError
from trainkit.models.linears import expert_parameters
from trainkit.objectives.objective import Sums
from trainkit.options.data import IGNORE_INDEX
from trainkit.parallel.rows import next_tokens

_LAYER = re.compile(r"\.(\d+)\.")


class Routing:
    """The routers' losses and the loads of experts since the last `take`.

    Attributes:
        layers: by a layer's name, how many experts it has.
        asks_reached: whether `take_reached` will be asked.
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
        end = 3
        for name, number in self.layers.items():
            self._places[name] = slice(end, end + number)
            end += number
        self.shape = (end,)
        self.asks_reached = False
        self._sums: Tensor | None = None
        self._reached: Tensor | None = None
        self._real: Tensor | None = None
        self._aimed: Tensor | None = None
        self._waiting: list[tuple[str, Tensor]] = []  # the experts (T, K) of a layer's tokens
        self._bounds: dict[tuple[str, ...], Tensor] = {}

    @property
    def sums(self) -> Tensor | None:
        """float64: two losses and their weight, then the tokens of each expert of each layer."""
        self._add_up()
        return self._sums

    @sums.setter
    def sums(self, values: Tensor | None) -> None:
        self._waiting.clear()
        self._sums = values

    def take_reached(self) -> dict[str, Tensor]:
        """By a layer's name, how many tokens with a target each expert got; then nobody asks."""
        self._add_up()
        reached, self._reached, self.asks_reached = self._reached, None, False
        if reached is None:
            return {}
        return {name: reached[place] for name, place in self._places.items()}

    def begin(self, inputs: dict[str, Any]) -> None:
        """These tokens go through the model now."""
        self._add_up()
        targets = targets_of(inputs)
        self._aimed = None if targets is None else (targets != IGNORE_INDEX).flatten().double()
        self._real = real_tokens(inputs).double()

    def add_losses(self, losses: Tensor, weight: Tensor | float) -> None:
        """A part of a step's routers' losses (2,), and what it has of the step."""
        sums = self._made(losses.device)
        sums[:2] += losses.detach()
        sums[2] += weight

    @torch.no_grad()
    def _count(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        real = self._real
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        if torch.compiler.is_compiling() or real is None or not module.training or not given:
            return
        name = self._names[id(module)]
        number = self.layers[name]
        index = next((each for each in given if not each.is_floating_point()), None)
        if index is not None and len(index) == len(real):
            self._waiting.append((name, index))
        elif index is None and len(given[0]) == number * len(real):  # rows sorted by expert
            got = (given[0].view(number, len(real), -1) != 0).any(-1)
            chosen = torch.where(got.T, torch.arange(number, device=got.device), number)
            self._waiting.append((name, chosen))

    @torch.no_grad()
    def _add_up(self) -> None:
        """Count what layers have been given since the batch began."""
        waiting, self._waiting = self._waiting, []
        for width in {index.shape[1] for _, index in waiting}:
            alike = [(name, index) for name, index in waiting if index.shape[1] == width]
            names, index = tuple(name for name, _ in alike), torch.stack([i for _, i in alike])
            if names not in self._bounds:
                bounds = [(self._places[name].start, self.layers[name]) for name in names]
                self._bounds[names] = torch.tensor(bounds, device=index.device)[:, :, None, None]
            start, number = self._bounds[names].unbind(1)
            known = (index >= 0) & (index < number)
            places = torch.where(known, start + index, self.shape[0])
            if self._real is not None:
                self._made(index.device).add_(_counts(places, self._real, self.shape[0]))
            if self.asks_reached and self._aimed is not None:
                found = _counts(places, self._aimed, self.shape[0])
                self._reached = found if self._reached is None else self._reached + found

    def _made(self, device: torch.device) -> Tensor:
        if self._sums is None:
            self._sums = torch.zeros(self.shape, dtype=torch.float64, device=device)
        return self._sums

    def rows(self, sums: Sequence[float]) -> dict[str, float]:
        """The routers' losses; of each layer the largest share of an expert, and three more.

        Those are the loads' standard deviation over their mean, how many experts got nothing, and
        the entropy over that of equal shares.
        """
        found = _named(sums[0] / sums[2], sums[1] / sums[2]) if sums[2] else {}
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


class RouterLosses(Sums):
    """The losses of a model's routers, of a whole step, and of a whole evaluation.

    The auxiliary loss is transformers' `load_balancing_loss_func`, of all tokens that are no
    padding: E sum_e (C_e / N) (P_e / N), where expert e was chosen C_e times, P_e sums its
    probabilities, and N counts tokens, in all layers together. The z loss is the mean of
    logsumexp(logits)^2. Gradients go through P alone: with C and N of the whole, a part's losses
    are sums over its own tokens, so they come to the same whatever the whole is cut into.

    Args:
        model: whose ``forward`` returns its routers' logits.
        own: the factor that it has for the auxiliary loss itself.
        aux: the factor of the auxiliary loss; None for the model's own.
        z: the factor of the z loss.

    Attributes:
        seen: what `count` says of the whole step, over all ranks; None before it is known.
        sums: what `count` says.
    """

    def __init__(self, model: nn.Module, own: float, aux: float | None, z: float) -> None:
        base = without_adapters(model)
        text = base.config.get_text_config()
        self.factors = (own if aux is None else aux, z)
        self.forward_options = {} if aux is None and not z else {"output_router_logits": True}
        self.is_on = bool(self.forward_options) or bool(
            getattr(text, "output_router_logits", False) and own
        )
        self.seen: Tensor | None = None
        if self.is_on:
            self._type = str(text.model_type)
            self._experts, self._chosen = _sizes(base, text)
            self.shape = (2 * self._experts + 2,)

    def count(self, outputs: Any, real: Tensor) -> Tensor:
        """(2E + 2,) float64: C, P, the sum for the z loss, and N; with gradients in P and z.

        Args:
            outputs: the model's.
            real: (T,), which tokens are no padding.
        """
        number, weight = self._experts, real.float()
        choices, found = weight.new_zeros(number).double(), weight.new_zeros(number)
        z = weight.new_zeros(1)
        given = outputs.get("router_logits")
        if not given:  # as granitemoe of transformers 5.17, which adds the loss and keeps them
            raise _without(self._type)
        for logits in given:
            rows = logits.reshape(-1, number)
            shares = rows.softmax(-1)
            index = shares.topk(self._chosen, -1).indices.flatten()
            choices.scatter_add_(0, index, weight.double().repeat_interleave(self._chosen))
            found = found + (shares.float() * weight[:, None]).sum(0)
            if self.factors[1]:
                z = z + (rows.float().logsumexp(-1).square() * weight).sum()
        tokens = weight.double().sum() * len(given)
        return torch.cat((choices, found.double(), z.double(), tokens[None]))

    def add(self, outputs: Any, real: Tensor) -> None:
        """A batch of an evaluation."""
        self.put(self.count(outputs, real).detach())

    def losses(self, mine: Tensor, whole: Tensor) -> Tensor:
        """(2,) float64, the part that has ``mine`` of a ``whole``, times the factors."""
        number, tokens = self._experts, whole[-1].clamp(min=1)
        balance = number * (whole[:number] / tokens * mine[number:-2]).sum() / tokens
        return torch.stack((balance, mine[-2] / tokens)) * balance.new_tensor(self.factors)

    def rows(self, sums: Sequence[float], prefix: str = "") -> dict[str, float]:
        whole = torch.tensor(list(sums), dtype=torch.float64)
        balance, z = self.losses(whole, whole).tolist()
        return _named(balance, z, prefix) if whole[-1] else {}


def _named(balance: float, z: float, prefix: str = "") -> dict[str, float]:
    found = {f"{prefix}router_loss": balance, f"{prefix}router_z_loss": z}
    return found if z else {f"{prefix}router_loss": balance}


def _sizes(base: Any, text: Any) -> tuple[int, int]:
    """How many experts there are, and how many a token is given, as the losses count them."""
    sizes = [
        next((n for n in (getattr(at, name, None) for at in (base, text)) if n), 0)
        for name in ("num_experts", "num_experts_per_tok")
    ]
    theirs = getattr(sys.modules[type(base).__module__], "load_balancing_loss_func", None)
    keys = inspect.signature(base.forward).parameters
    if theirs is not None and "output_router_logits" in keys and all(sizes):
        with torch.random.fork_rng(devices=()):
            logits = tuple(torch.randn(2, 5, sizes[0]).unbind())
        ours = object.__new__(RouterLosses)
        ours._experts, ours._chosen = sizes
        ours.factors = (1.0, 0.0)
        whole = ours.count({"router_logits": logits}, torch.ones(5, dtype=torch.bool))
        try:
            value = theirs(logits, *sizes)
        except TypeError:
            value = None
        if value is not None and abs(float(value - ours.losses(whole, whole)[0])) < 1e-4:
            return sizes[0], sizes[1]
    raise _without(text.model_type)


def _without(model_type: str) -> ModelError:
    return ModelError(
        f"the routers of {model_type} have no auxiliary loss of transformers' form",
        where="model.router_aux_loss",
        fix="remove router_aux_loss and router_z_loss, and leave output_router_logits false in "
        "the model's config.json",
    )


def _counts(places: Tensor, tokens: Tensor, size: int) -> Tensor:
    """(size,): how often each place below is in places (L, T, K), of the tokens (T,) that count."""
    weights = tokens[:, None].expand_as(places).flatten()
    return weights.new_zeros(size + 1).scatter_add_(0, places.flatten(), weights)[:size]


def targets_of(inputs: dict[str, Any]) -> Tensor | None:
    """What each token is to predict, (B, S), where labels say so."""
    labels, targets = inputs.get("labels"), inputs.get("shift_labels")
    return targets if labels is None or targets is not None else next_tokens(labels, IGNORE_INDEX)


def real_tokens(inputs: dict[str, Any]) -> Tensor:
    """(T,): which tokens are no padding."""
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        return mask.flatten() != 0
    return ~_tails(ids, inputs.get("position_ids"), targets_of(inputs)).flatten()


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


class Together(Sums):
    """Several figures as one."""

    @classmethod
    def of(cls, *parts: Any) -> Together | None:
        """Those that there are; None for none."""
        there = [each for each in parts if each is not None]
        return cls(there) if there else None

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts
        self._sizes = [int(torch.Size(each.shape).numel()) for each in parts]
        self.shape = (sum(self._sizes),)

    @property
    def sums(self) -> Tensor | None:
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

    def rows(self, sums: Sequence[float], prefix: str = "") -> dict[str, float]:
        found: dict[str, float] = {}
        for each, size in zip(self.parts, self._sizes, strict=True):
            mine, sums = sums[:size], sums[size:]
            found |= each.rows(mine, prefix) if prefix else each.rows(mine)
        return found
