"""Norms: which modules are RMSNorms, and the kernel in their place.

Shapes: B batch, S sequence, H hidden, D head size.
"""

import copy
import itertools
from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainkit import kernels
from trainkit.models.proof.compare import (
    EXACT,
    Error,
    Truth,
    decisions,
    draw,
    error_of,
    other_mode,
    share_of_other_bits,
)
from trainkit.models.proof.forward import Finding, KernelForward

Cast = Literal["llama", "gemma"]
CASTS: tuple[Cast, ...] = ("llama", "gemma")
_EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12, torch.finfo(torch.float32).eps, torch.finfo().eps, 0.0)
_NO_NORMS = (nn.Linear, nn.Embedding, nn.Dropout, nn.Conv1d, nn.Conv2d, nn.Identity)


class RMSNorm(KernelForward):
    """``rms_norm`` instead of the module's own; x is (B, S, H) or (B, S, heads, D).

    Attributes:
        weight_name: where the weight is; "" where there is none.
        epsilon: the attribute that holds it.
        feeds_fp8: whether all that reads the result quantises it; see `models.fp8_rows`.
    """

    uses = ("rms_norm",)

    weight_name: ClassVar[str] = "weight"
    epsilon: ClassVar[str]
    offset: ClassVar[float] = 0.0
    cast: ClassVar[Cast] = "llama"
    feeds_fp8: bool = False

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x over its last axis."""
        if self.decodes(x):
            return super().forward(x)
        name = self.weight_name
        return kernels.rms_norm(
            x,
            getattr(self, name) if name else x.new_ones(x.shape[-1]),
            getattr(self, self.epsilon),
            offset=self.offset,
            cast=self.cast,
            fp8_rows=self.feeds_fp8,
        )


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
    epsilons = dict.fromkeys([*own.values(), *_EPSILONS])
    nearest: Error = (float("inf"), "")
    offsets = {0: (0.0,), 1: (0.0, 1.0), 2: ()}[len(names)]
    for eps, offset in itertools.product(epsilons, offsets):

        def ours(
            x: Tensor, cast: Cast = "gemma", eps: float = eps, offset: float = offset
        ) -> Tensor:
            weight = module.get_parameter(names[0]) if names else x.new_ones(x.shape[-1])
            return kernels.rms_norm(x, weight, eps, offset=offset, cast=cast)

        error = truth.against(ours)
        nearest = min(nearest, error, key=lambda each: each[0])
        if error[0] < EXACT:
            break
    else:
        if any(truth.against(_layer_norm(parameters, eps))[0] < EXACT for eps in epsilons):
            return Finding("rms_norm", "no kernel", "LayerNorm: trainkit has no kernel for it")
        reason = f"no variant fits, the nearest is off by {nearest[0]:.0e} {nearest[1]}".strip()
        return Finding("rms_norm", "refused", reason) if is_called_norm else None
    if found := decisions(module):
        return Finding("rms_norm", "refused", f"it decides by {found[0]}", error[0])
    with other_mode(module) as mode, torch.no_grad():
        other = error_of(module, ours, inputs)
    if not other[0] < EXACT:
        return Finding("rms_norm", "refused", f"another function in {mode}: {other[0]:.0e}")
    settings = {"weight_name": names[0] if names else "", "offset": offset}
    holder = next((name for name, value in own.items() if value == eps), None)
    settings |= {"epsilon": holder} if holder else {"epsilon": "eps_found", "eps_found": eps}
    low = module.to(torch.bfloat16)
    x16 = [draw(64, *middle, seed=5).to(torch.bfloat16)]
    shares = {cast: share_of_other_bits(low, lambda x: ours(x, cast), x16) for cast in CASTS}  # noqa: B023
    cast = min(CASTS, key=lambda each: shares[each])
    detail = f"{cast} rounding, eps {eps:g}"
    detail += f", weight + {offset:g}" if offset else "" if names else ", no weight"
    return Finding(
        "rms_norm", "on", detail, error[0], shares[cast], RMSNorm, {**settings, "cast": cast}
    )


def _layer_norm(parameters: list[nn.Parameter], eps: float) -> Callable[[Tensor], Tensor]:
    weight, bias = [*parameters, None, None][:2]
    return lambda x: functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
