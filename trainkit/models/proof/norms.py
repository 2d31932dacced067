"""Norms: which modules are RMSNorms or LayerNorms, and the kernel in their place.

Shapes: B batch, S sequence, H hidden, D head size.

RMSNorms with a gate: which variant a module of two inputs is, and the kernel in its place.

Shapes: B batch, S sequence, H hidden, D head size.

Norms that quantise what they give, where all that reads it would.

A norm has its row in registers; whoever quantises it later reads it again.
"""

import copy
import functools
import inspect
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from trainkit import kernels
from trainkit.models.linears import kind_of
from trainkit.models.proof.compare import (
    Finding,
    Truth,
    decisions,
    draw,
    first_fit,
    share_of_other_bits,
    why_not,
)
from trainkit.models.swap import KernelForward

Cast = Literal["llama", "gemma"]
CASTS: tuple[Cast, ...] = ("llama", "gemma")
EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12, torch.finfo(torch.float32).eps, torch.finfo().eps, 0.0)
_ASKS_AUTOCAST = re.compile(r"(not )?torch\.is_autocast_enabled\(\w*\)")
_NO_NORMS = (nn.Linear, nn.Embedding, nn.Dropout, nn.Conv1d, nn.Conv2d, nn.Identity)


class NormSettings(NamedTuple):
    """What a norm computes, and where its module keeps what it computes with.

    Attributes:
        centred: LayerNorm, which takes the mean off first.
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
        if self.decodes(x) or self.made.keeps_own(x):
            return super().forward(x)
        y: Tensor = self.made.run(self, x)
        return y


class RMSNorm(Norm):
    """``rms_norm``.

    Attributes:
        feeds_fp8: whether all that reads the result quantises it; see `models.proof.norms`.
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
    inputs = [_rows_like(x)]
    truth = Truth(module, inputs, module.parameters())
    if truth.error:
        return Finding("rms_norm", "refused", truth.error[1]) if is_called_norm else None
    weight, bias = [*names, "", ""][:2]
    plain = NormSettings(weight, bias, 0.0, 0.0, "gemma", False, False)
    kinds = (True,) if bias or "layer_norm" in truth.used else (False, True)
    variants = (
        plain._replace(centred=centred, epsilon=eps, offset=offset)
        for centred, eps, offset in itertools.product(
            kinds, _epsilons(module), (0.0, 1.0) if weight else (0.0,)
        )
    )
    fit = first_fit(truth, variants, lambda made: functools.partial(made.run, module))
    if fit.reason:
        return Finding("rms_norm", "refused", fit.reason) if is_called_norm else None
    made: NormSettings = fit.variant
    op = "layer_norm" if made.centred else "rms_norm"
    found = decisions(module)
    by_autocast = [each for each in found if _ASKS_AUTOCAST.fullmatch(each)]
    left = [each for each in found if each not in by_autocast]
    if no := why_not(module, fit.ours, inputs, (), left):
        return Finding(op, "refused", no, fit.error)
    made, share = _rounding_as(module, made, x, CASTS[1:] if made.centred else CASTS)
    detail = "LayerNorm" if made.centred else f"{made.cast} rounding"
    offset = f", weight + {made.offset:g}" if made.offset else ""
    detail += f", eps {fit.variant.epsilon:g}{offset}" + ("" if weight else ", no weight")
    made = made._replace(own_under_autocast=bool(by_autocast) or isinstance(module, nn.LayerNorm))
    forward = LayerNorm if made.centred else RMSNorm
    return Finding(op, "on", detail, fit.error, share, forward, {"made": made})


def _rows_like(x: Tensor, seed: int = 0) -> Tensor:
    """Rows with eps of no weight, of weight, and of none."""
    middle = (2, *x.shape[2:]) if x.dim() > 2 else x.shape[1:]
    scales = enumerate((1.0, 2e-3, 30.0), seed)
    return torch.cat([draw(2, *middle, seed=number, scale=scale) for number, scale in scales])


def _own_epsilons(module: nn.Module) -> dict[str, float]:
    return {k: v for k, v in vars(module).items() if isinstance(v, float) and 0 <= v < 0.1}


def _epsilons(module: nn.Module) -> Iterable[float]:
    return dict.fromkeys([*_own_epsilons(module).values(), *EPSILONS])


def _rounding_as(
    module: nn.Module, made: Any, x: Tensor, casts: Sequence[Cast] = CASTS, num_inputs: int = 1
) -> tuple[Any, float]:
    """Settings that round where the module does, and the share of bf16 results with other bits.

    They name the attribute that holds the epsilon, where there is one.
    """
    low = copy.deepcopy(module).to(torch.bfloat16)
    middle = (2, *x.shape[2:]) if x.dim() > 2 else x.shape[1:]
    inputs = [draw(64, *middle, seed=5 + n).to(torch.bfloat16) for n in range(num_inputs)]
    shares = {
        cast: share_of_other_bits(low, functools.partial(made._replace(cast=cast).run, low), inputs)
        for cast in casts
    }
    cast = min(shares, key=lambda each: shares[each])
    own = _own_epsilons(module).items()
    name = next((name for name, value in own if value == made.epsilon), made.epsilon)
    return made._replace(cast=cast, epsilon=name), shares[cast]


_ARGUMENTS = ["hidden_states", "gate"]
_NUM_COLUMNS = re.compile(r"\*\w+, (\w+) = hidden_states\.shape\n")
_KEEPS_SHAPE = {"forward", "to", "silu", "super"}


class GatedNormSettings(NamedTuple):
    """What a gated norm computes, as ``kernels.gated_rms_norm`` takes it."""

    weight: str
    epsilon: str | float
    group: int
    gate_first: bool
    activation: str
    cast: Cast = "gemma"

    def run(self, module: nn.Module, x: Tensor, gate: Tensor) -> Tensor:
        weight, eps, *_ = self
        eps = getattr(module, eps) if isinstance(eps, str) else eps
        options = self._asdict()
        del options["weight"], options["epsilon"]
        return kernels.gated_rms_norm(x, gate, getattr(module, weight), eps, **options)


class GatedNorm(KernelForward):
    """``gated_rms_norm``."""

    uses = ("gated_rms_norm",)
    made: ClassVar[GatedNormSettings]

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        """Normalise the last axis of (B, S, H), (B, S, heads, D) or (rows, D), and gate it."""
        if gate is None or hidden_states.shape != gate.shape or self.decodes(hidden_states):
            plain: Tensor = super().forward(hidden_states, gate)
            return plain
        return self.made.run(self, hidden_states, gate)


def find_gated_norm(module: nn.Module, x: Tensor, gate: Tensor, result: Tensor) -> Finding | None:
    """What a module without children is that was called with two tensors.

    Returns:
        None for what neither is such a norm nor is called one.
    """
    is_called_norm = "norm" in type(module).__name__.lower()

    def refused(reason: str, error: float | None = None) -> Finding | None:
        """Of what is no norm by name, nothing is said."""
        return Finding("gated_rms_norm", "refused", reason, error) if is_called_norm else None

    shapes = [tuple(each.shape) for each in module.parameters()]
    if x.shape != result.shape or x.shape != gate.shape or shapes != [(x.shape[-1],)]:
        return refused("its shapes are not a gated norm's")
    if list(inspect.signature(type(module).forward).parameters) != ["self", *_ARGUMENTS]:
        return refused(f"its arguments are not {_ARGUMENTS}")
    module = copy.deepcopy(module).cpu().double()
    inputs = [_rows_like(x), _rows_like(x, 3)]
    truth = Truth(module, inputs, module.parameters())
    if truth.error:
        return refused(truth.error[1])
    (weight,) = (name for name, _ in module.named_parameters())
    hidden = x.shape[-1]
    numbers = {v for v in vars(module).values() if type(v) is int and v > 0 and not hidden % v}
    groups = dict.fromkeys([hidden, *numbers, *(hidden // each for each in numbers)])
    variants = (
        GatedNormSettings(weight, *each)
        for each in itertools.product(_epsilons(module), groups, (False, True), ("silu", "sigmoid"))
    )
    fit = first_fit(truth, variants, lambda made: functools.partial(made.run, module))
    if fit.reason:
        return refused(fit.reason)
    if no := why_not(module, fit.ours, inputs, (), _decisions(module)):
        return refused(no, fit.error)
    made, share = _rounding_as(module, fit.variant, x, num_inputs=2)
    detail = f"{made.cast} rounding, eps {fit.variant.epsilon:g}, {made.activation} gate "
    detail += "before it" if made.gate_first else "behind it"
    detail += f", groups of {made.group}" if made.group != hidden else ""
    return Finding("gated_rms_norm", "on", detail, fit.error, share, GatedNorm, {"made": made})


def _decisions(module: nn.Module) -> list[str]:
    """What it decides by, except the gate being there and the number of columns."""
    harmless = {"gate is not None"}
    try:
        source = inspect.getsource(type(module).forward)
    except (OSError, TypeError):
        source = ""
    before, *after = _NUM_COLUMNS.split(source)
    if after and set(re.findall(r"(\w+)\(", before)) <= _KEEPS_SHAPE and "[" not in before:
        own = (name for name, each in vars(module).items() if isinstance(each, int))
        harmless |= {f"{after[0]} // self.{name}" for name in own}
    return [each for each in decisions(module) if each not in harmless]


READERS = {
    "input_layernorm": (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.qkv_proj",
    ),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj"),
}
"""Norms of a decoder layer, and which of its linear layers read them, by their paths."""


def let_norms_quantize(model: nn.Module) -> int:
    """Have trainkit's norms make rows in e4m3 for layers in fp8.

    Returns:
        How many norms do.
    """
    number = 0
    for layer in model.modules():
        modules = dict(layer.named_children())
        for name, paths in READERS.items():
            norm = modules.get(name)
            if not isinstance(norm, RMSNorm):
                continue
            own = dict(layer.named_modules())
            readers = [own[path] for path in paths if path in own]
            kinds = [kind_of(getattr(each, "base_layer", each)) for each in readers]
            is_read_so = all(kind is not None and kind.quantizes_rows for kind in kinds)
            norm.feeds_fp8 = bool(kinds) and is_read_so
            number += norm.feeds_fp8
    return number
