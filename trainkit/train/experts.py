"""Proves with the first step that every adapter of an expert that was given a token trains."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from trainkit.errors import TrainkitError
from trainkit.objectives.routing import Routing
from trainkit.parallel.parameters import all_ranks, is_whole
from trainkit.train.hooks import Hook, LoopState


class ExpertsTrain(Hook):
    """Holds the first step's gradients and update against the tokens that each expert was given.

    B of a fresh adapter is zero: where a token with a target went through an expert, it has a
    gradient, and moves with the first update at a rate above zero. Of a token without a target
    nothing need come back.
    """

    def begin(self, loop: LoopState, checkpoint: Path | None) -> None:
        # Where the loss counts what experts are given.
        parts = getattr(loop.loss.train_metrics, "parts", ())
        self._routing = next((each for each in parts if isinstance(each, Routing)), None)
        self._got: dict[str, Tensor] = {}
        self._moving: dict[str, tuple[Any, Tensor]] = {}
        self._hooks = []
        for name, layer in _adapters(loop.model) if self._routing and checkpoint is None else ():
            hear = partial(self._hear, name, layer.num_experts)
            self._hooks.append(_factor(layer).register_hook(hear))
        if self._routing is not None:
            self._routing.asks_reached = bool(self._hooks)

    def _hear(self, name: str, number: int, gradient: Tensor) -> None:
        got = _experts_in(gradient, number)
        self._got[name] = got | self._got[name] if name in self._got else got

    def on_pre_optimizer_step(self, loop: LoopState) -> None:
        if self._routing is None or not self._routing.asks_reached:
            return
        reached = self._routing.take_reached()
        for each in self._hooks:
            each.remove()
        for name, layer in _adapters(loop.model):
            wanted = next((n for at, n in reached.items() if name.startswith(at)), None)
            if wanted is None:
                continue
            factor, wanted = _factor(layer), wanted > 0
            got = self._got.get(name)
            if got is None and factor.grad is not None:  # sharded: complete gradients only
                got = _experts_in(all_ranks(factor.grad), layer.num_experts)
            if got is None:
                got = torch.zeros_like(wanted)
            _refuse(name, wanted & ~got, "has no gradient")
            if is_whole(factor) and not factor.any():
                self._moving[name] = layer, wanted

    def stepped(self, loop: LoopState, losses: Any) -> None:
        """The first update at a rate above zero that was not held back."""
        if not self._moving or not loop.rate:
            return
        moved = {
            name: _experts_in(_factor(layer).detach(), layer.num_experts)
            for name, (layer, _) in self._moving.items()
        }
        if not any(bool(each.any()) for each in moved.values()):
            if not loop.guard.is_held and not loop.args.fp16:
                _refuse(next(iter(moved)), next(iter(self._moving.values()))[1], "did not move")
            return
        for name, (_, wanted) in self._moving.items():
            _refuse(name, wanted & ~moved[name], "did not move: the optimizer does not have it")
        self._moving = {}


def _adapters(model: nn.Module) -> list[tuple[str, Any]]:
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, ParamWrapper) and module.num_experts > 1
    ]


def _factor(layer: Any) -> nn.Parameter:
    (weight,) = layer.lora_B[layer.active_adapters[0]].parameters()
    return weight


def _experts_in(b: Tensor, number: int) -> Tensor:
    """Which experts have anything in B, which peft keeps with the expert's number fastest."""
    return (b.reshape(-1, number) != 0).any(0)


def _refuse(name: str, inert: Tensor, what: str) -> None:
    if bool(inert.any()):
        numbers = inert.nonzero().flatten().tolist()
        named = name.removeprefix("base_model.model.").replace(".base_layer", "")
        raise TrainkitError(
            f"the adapter of {named}, experts {', '.join(map(str, numbers[:8]))}"
            f"{' and more' if len(numbers) > 8 else ''}, {what}, though tokens went through them",
            fix="train with kernels: {lora_experts: false}, or leave the experts out with "
            "lora.experts: false, and report this",
        )
