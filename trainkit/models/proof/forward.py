"""What every forward that is swapped in says about itself, and what a proof says."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import nn


class KernelForward(nn.Module):
    """A mixin in front of Hugging Face's class: ``super().forward`` is that class's own code.

    Weights are read as ``self.x.weight`` while the forward runs; ZeRO-3 gathers them then.
    Single-token decoding keeps Hugging Face's code: at that size a step is bound by launches, and
    generation stays what it was, bit for bit, after the prompt.
    """

    uses: ClassVar[tuple[str, ...]] = ()
    """The public functions of ``trainkit.kernels`` it calls."""

    def decodes(self, x: torch.Tensor) -> bool:
        """Whether this call generates one token: then Hugging Face's own forward runs."""
        return not self.training and x.shape[1] == 1 and not torch.is_grad_enabled()


@dataclass(frozen=True)
class Finding:
    """What one module was found to be.

    Args:
        op: the switch.
        verdict: "on"; "no kernel": it is known what it is, and trainkit has no kernel for it;
            "refused": it looks like what the op is for, and could not be proved to be.
        detail: what it is, or why it is refused.
        error: the largest relative error of outputs and gradients in fp64.
        bits: the share of bf16 results whose bits are not Hugging Face's; None where none were
            compared.
        forward: the mixin that takes its place, where it is on.
        settings: class attributes of the mixin.
    """

    op: str
    verdict: Literal["on", "no kernel", "refused"]
    detail: str
    error: float | None = None
    bits: float | None = None
    forward: type[KernelForward] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
