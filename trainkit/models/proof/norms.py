"""Norms: which modules are RMSNorms or LayerNorms, and the kernel in their place.

Shapes: B batch, S sequence, H hidden, D head size.
"""

import copy
import functools
import itertools
import re
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from trainkit import kernels
from trainkit.models.proof.compare import (
    EXACT,
    Error,
    Truth,
    decisions,
    draw,
    share_of_other_bits,
    why_not,
)
from trainkit.models.proof.forward import Finding, KernelForward

Cast = Literal["llama", "gemma"]
CASTS: tuple[Cast, ...] = ("llama", "gemma")
EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12, torch.finfo(torch.float32).eps, torch.finfo().eps, 0.0)
_ASKS_AUTOCAST = re.compile(r"(not )?torch\.is_autocast_enabled\(\w*\)")
_NO_NORMS = (nn.Linear, nn.Embedding, nn.Dropout, nn.Conv1d, nn.Conv2d, nn.Identity)


class NormSettings(NamedTuple):
    """What a norm computes, and where its module keeps what it computes with.

    Attributes:
        weight: the name of the weight; "" where there is none.
        bias: of the bias; "" where there is none.
        epsilon: of the attribute that holds it, or the number.
        offset: added to the weight.
        cast: where an RMSNorm rounds.
        centred: LayerNorm, which takes the mean off first.
        own_under_autocast: what torch does under autocast, it does itself.
    """

    weight: str
    bias: str
    epsilon: str | float
    offset: float
    cast: Cast
    centred: bool
    own_under_autocast: bool

    def keeps_own(self, x: Tensor) -> bool:
        """Whether Hugging Face's code runs, for autocast's sake."""
        return self.own_under_autocast and torch.is_autocast_enabled(x.device.type)

    def run(self, module: nn.Module, x: Tensor, residual: Tensor | None = None) -> Any:
        """The kernel's norm of x; with a residual, of the sum, and the sum."""
        weight = getattr(module, self.weight) if self.weight else x.new_ones(x.shape[-1])
        eps = self.epsilon
        eps = getattr(module, eps) if isinstance(eps, str) else eps
        inputs: tuple[Any, ...] = (x, weight) if residual is None else (x, residual, weight)
        if self.centred:
            op: Any = kernels.layer_norm if residual is None else kernels.add_layer_norm
            bias = getattr(module, self.bias) if self.bias else None
            return op(*inputs, bias, eps, offset=self.offset)
        op = kernels.rms_norm if residual is None else kernels.add_rms_norm
        fp8_rows = getattr(module, "feeds_fp8", False)
        return op(*inputs, eps, offset=self.offset, cast=self.cast, fp8_rows=fp8_rows)


class Norm(KernelForward):
    """The kernel instead of the module's own; x is (B, S, H) or (B, S, heads, D)."""

    made: ClassVar[NormSettings]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x over its last axis."""
        if self.decodes(x) or self.made.keeps_own(x):
            return super().forward(x)
        y: Tensor = self.made.run(self, x)
        return y


class RMSNorm(Norm):
    """``rms_norm``.

    Attributes:
        feeds_fp8: whether all that reads the result quantises it; see `models.fp8_rows`.
    """

    uses = ("rms_norm",)
    feeds_fp8: bool = False


class LayerNorm(Norm):
    """``layer_norm``."""

    uses = ("layer_norm",)


def find_norm(module: nn.Module, x: Tensor, result: Tensor) -> Finding | None:
    """What a module without children is, given what it was called with and gave.

    Returns:
        None for what neither is a norm nor is called one.
    """
    weights = dict(module.named_parameters())
    is_called_norm = "norm" in type(module).__name__.lower()
    shapes = [tuple(each.shape) for each in weights.values()]
    if x.shape != result.shape or len(weights) > 2 or isinstance(module, _NO_NORMS):
        return None
    if not is_called_norm and not weights:
        return None
    if any(shape != (x.shape[-1],) for shape in shapes):
        reason = f"its weights {shapes} are not one for each of {x.shape[-1]} columns"
        return Finding("rms_norm", "refused", reason) if is_called_norm else None
    return _prove(copy.deepcopy(module).cpu().double(), x, is_called_norm)


def _prove(module: nn.Module, x: Tensor, is_called_norm: bool) -> Finding | None:
    names = [name for name, _ in module.named_parameters()]
    middle = (2, *x.shape[2:]) if x.dim() > 2 else x.shape[1:]
    scales = (1.0, 2e-3, 30.0)  # with eps of no weight, of weight, and of none
    inputs = [torch.cat([draw(2, *middle, seed=i, scale=s) for i, s in enumerate(scales)])]
    parameters = list(module.parameters())
    truth = Truth(module, inputs, parameters)
    if truth.error:
        return Finding("rms_norm", "refused", truth.error[1]) if is_called_norm else None
    own = {k: v for k, v in vars(module).items() if isinstance(v, float) and 0 <= v < 0.1}
    epsilons = dict.fromkeys([*own.values(), *EPSILONS])
    nearest: Error = (float("inf"), "")
    weight, bias = [*names, "", ""][:2]
    made = NormSettings(weight, bias, 0.0, 0.0, "gemma", False, False)
    kinds = (True,) if bias or "layer_norm" in truth.used else (False, True)
    for centred, eps, offset in itertools.product(
        kinds, epsilons, (0.0, 1.0) if weight else (0.0,)
    ):
        made = made._replace(centred=centred, epsilon=eps, offset=offset)
        error = truth.against(functools.partial(made.run, module))
        nearest = min(nearest, error, key=lambda each: each[0])
        if error[0] < EXACT:
            break
    else:
        reason = f"no variant fits, the nearest is off by {nearest[0]:.0e} {nearest[1]}".strip()
        return Finding("rms_norm", "refused", reason) if is_called_norm else None
    op = "layer_norm" if made.centred else "rms_norm"
    found = decisions(module)
    by_autocast = [each for each in found if _ASKS_AUTOCAST.fullmatch(each)]
    left = [each for each in found if each not in by_autocast]
    if no := why_not(module, functools.partial(made.run, module), inputs, (), left):
        return Finding(op, "refused", no, error[0])
    low = copy.deepcopy(module).to(torch.bfloat16)
    x16 = [draw(64, *middle, seed=5).to(torch.bfloat16)]
    shares = {
        cast: share_of_other_bits(low, functools.partial(made._replace(cast=cast).run, low), x16)
        for cast in (CASTS[1:] if made.centred else CASTS)
    }
    cast = min(shares, key=lambda each: shares[each])
    made = made._replace(
        cast=cast,
        epsilon=next((name for name, value in own.items() if value == eps), eps),
        own_under_autocast=bool(by_autocast) or isinstance(module, nn.LayerNorm),
    )
    detail = "LayerNorm" if made.centred else f"{cast} rounding"
    detail += f", eps {eps:g}" + (f", weight + {offset:g}" if offset else "")
    detail += "" if weight else ", no weight"
    forward = LayerNorm if made.centred else RMSNorm
    return Finding(op, "on", detail, error[0], shares[cast], forward, {"made": made})
