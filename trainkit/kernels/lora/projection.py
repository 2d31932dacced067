"""What a fused function needs to know about one adapted linear layer.

Shapes: K inputs, N outputs, R rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Unpack = Callable[[Tensor, torch.dtype], Tensor]


@dataclass(frozen=True)
class Projection:
    """A frozen linear layer and its adapter, read from their modules at call time.

    Attributes:
        weight: (N, K), or the storage of a packed weight that ``unpack`` understands. Frozen.
        bias: (N,), frozen, or None.
        lora_a: (R, K), or None for a layer without an adapter.
        lora_b: (N, R), present when ``lora_a`` is.
        scaling: factor of the adapter's output.
        unpack: turns packed storage into (N, K) of a dtype; called once per use of the weight, in
            the forward and in the backward pass.
    """

    weight: Tensor
    bias: Tensor | None = None
    lora_a: Tensor | None = None
    lora_b: Tensor | None = None
    scaling: float = 1.0
    unpack: Unpack | None = None

    @property
    def lora_rank(self) -> int:
        """R; 0 without an adapter."""
        return 0 if self.lora_a is None else self.lora_a.shape[0]

    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """What autograd must see: weight, bias, A, B."""
        return self.weight, self.bias, self.lora_a, self.lora_b

    def read(self, dtype: torch.dtype) -> Tensor:
        """The weight (N, K) in a dtype; no copy when it has it already."""
        return read_weight(self.weight, self.unpack, dtype)


def read_weight(weight: Tensor, unpack: Unpack | None, dtype: torch.dtype) -> Tensor:
    """A weight (N, K) in a dtype: unpacked straight into it, or cast when it differs."""
    if unpack is not None:
        return unpack(weight, dtype)
    return weight.to(dtype)
