"""Feed-forward blocks that compute some tokens at a time: for long rows.

A block's wide numbers (gate, up and their product, 3.5 times the model's width each in Llama) exist
for one tile of tokens only, in both passes: the backward pass computes a tile again, takes its
gradients, and goes on to the next. Each token has the numbers that it has in the whole; gradients
of trained weights are summed over tiles in fp32 and rounded once, as one product would be.

It lies on whatever the block is made of: plain, with kernels, with fused adapters, over packed
weights. Dropout draws tile by tile, the same in both passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainkit.errors import PatchError
from trainkit.models.swap import Swaps, subclass_of

_Run = Callable[[Tensor], Tensor]


def tile(model: nn.Module, chunk_tokens: int | None) -> Swaps:
    """Have every feed-forward block compute at most so many tokens at a time."""
    if chunk_tokens is None:
        return Swaps(model, {})
    blocks = [module for module in model.modules() if _is_feed_forward(module)]
    if not blocks:
        raise PatchError(
            "no feed-forward block of the model is known: one with down_proj, outside of experts",
            where="model.mlp_chunk_tokens",
            fix="remove it",
        )
    settings = {"chunk_tokens": chunk_tokens}
    return Swaps(model, {each: subclass_of(type(each), TiledMLP, settings) for each in blocks})


def _is_feed_forward(module: nn.Module) -> bool:
    """Whether it turns tokens into tokens, each by itself; experts are given theirs by a router."""
    down = getattr(module, "down_proj", None)
    return isinstance(down, nn.Module) and not hasattr(module, "num_experts")


class TiledMLP(nn.Module):
    """The block whose class lies below, a tile at a time."""

    chunk_tokens: ClassVar[int]

    def forward(self, x: Tensor) -> Tensor:
        """(..., T, H) to the same shape."""
        tokens = x.shape[:-1].numel()
        if tokens <= self.chunk_tokens:
            return super().forward(x)
        trained = [each for each in self.parameters() if each.requires_grad]
        row = x.reshape(1, tokens, x.shape[-1])
        found = _Tiled.apply(super().forward, -(-tokens // self.chunk_tokens), row, *trained)
        return found.view(x.shape)


class _Surroundings:
    """What a tile's numbers depend on besides its tokens: autocast, and where chance is."""

    def __init__(self, x: Tensor) -> None:
        kind = x.device.type
        self._autocast: dict[str, Any] = {
            "device_type": kind,
            "enabled": torch.is_autocast_enabled(kind),
            "dtype": torch.get_autocast_dtype(kind),
            # A cached copy of a weight would belong to the graph of the tile that made it.
            "cache_enabled": False,
        }
        self._device = x.device if x.is_cuda else None
        self._states = [torch.get_rng_state()]
        if self._device is not None:
            self._states.append(torch.cuda.get_rng_state(self._device))

    def precision(self) -> torch.autocast:
        return torch.autocast(**self._autocast)

    def again(self) -> ExitStack:
        """Within, all is as it was; afterwards, as it is now."""
        stack = ExitStack()
        devices = [] if self._device is None else [self._device]
        stack.enter_context(torch.random.fork_rng(devices=devices))
        torch.set_rng_state(self._states[0])
        if self._device is not None:
            torch.cuda.set_rng_state(self._states[1], self._device)
        stack.enter_context(self.precision())
        return stack


class _Tiled(torch.autograd.Function):
    """A block of (1, T, H), tile by tile."""

    @staticmethod
    def forward(ctx: Any, run: _Run, count: int, x: Tensor, *trained: Tensor) -> Tensor:
        ctx.run, ctx.count, ctx.surroundings = run, count, _Surroundings(x)
        ctx.save_for_backward(x, *trained)
        result: Tensor | None = None
        with ctx.surroundings.precision():
            for piece, at in _tiles(x, count):
                part = run(piece)
                if result is None:
                    result = part.new_empty(x.shape)
                result[:, at].copy_(part)
        assert result is not None
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, *trained = ctx.saved_tensors
        needs_x = ctx.needs_input_grad[2]
        into_x = torch.empty_like(x) if needs_x else None
        sums: list[Tensor | None] = [None] * len(trained)
        with ctx.surroundings.again(), torch.enable_grad():
            for piece, at in _tiles(x, ctx.count):
                own = piece.detach().requires_grad_(needs_x)
                wanted = [own, *trained] if needs_x else trained
                found = list(
                    torch.autograd.grad(ctx.run(own), wanted, gradient[:, at], allow_unused=True)
                )
                if into_x is not None:
                    into_x[:, at].copy_(found.pop(0))
                _add(sums, found)
        rounded = [
            None if each is None else each.to(weight.dtype)
            for each, weight in zip(sums, trained, strict=True)
        ]
        return None, None, into_x, *rounded


def _tiles(x: Tensor, count: int) -> list[tuple[Tensor, slice]]:
    """Tiles of (1, T, H), of nearly equal size, and where each is."""
    tokens = x.shape[1]
    ends = [tokens * number // count for number in range(count + 1)]
    return [(x[:, at], at) for at in [slice(*ends[number : number + 2]) for number in range(count)]]


@torch.no_grad()
def _add(sums: list[Tensor | None], found: Sequence[Tensor | None]) -> None:
    """Add a tile's gradients, in fp32 at least."""
    for number, each in enumerate(found):
        if each is None:
            continue
        wide = torch.promote_types(each.dtype, torch.float32)
        total = sums[number]
        sums[number] = each.to(wide, copy=True) if total is None else total.add_(each)
