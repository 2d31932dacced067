"""Gated feed-forward blocks: down(act(gate(x)) * up(x)), with the gate in one kernel.

Shapes: B batch, S sequence, H hidden, F feed-forward.

Experts whose weights lie in two tensors: the sum over a token's experts of their gated blocks.

Hugging Face loops over the experts that got a token, which by itself decides by what comes in. That
loop, and nothing else that decides, is allowed here; routes at its edges are part of the proof.

Shapes: T tokens, K experts a token, E experts, H hidden, I an expert's width.
"""

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainkit import kernels
from trainkit.kernels.experts.function import ACTIVATIONS as EXPERT_ACTIVATIONS
from trainkit.kernels.experts.function import Limits, Packed, moe_mlp_reference, why_no_kernel
from trainkit.models.packed_experts import stack_of
from trainkit.models.proof.compare import (
    FAILURES,
    Finding,
    Truth,
    Wide,
    decisions,
    draw,
    first_fit,
    share_of_other_bits,
    why_not,
)
from trainkit.models.shared_input import apply_feed_forward, apply_linears
from trainkit.models.swap import KernelForward, subclass_of

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu": functional.gelu,
    "relu": functional.relu,
    "sigmoid": torch.sigmoid,
}


class SplitMLP(KernelForward):
    """``down(act(gate(x)) * up(x))`` with the gate in one kernel."""

    uses = ("swiglu",)

    linears: ClassVar[tuple[str, ...]]
    activation: ClassVar[str] = "silu"

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """The gated activation of two (B, S, F) tensors."""
        return kernels.swiglu(gate, up)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, H) to (B, S, H)."""
        if self.decodes(x):
            return super().forward(x)
        gate, up, down = (getattr(self, name) for name in self.linears)
        y = apply_feed_forward(x, gate, up, down, tanh_gelu=self.activation != "silu")
        if y is not None:
            return y
        return down(self.gate(*apply_linears(x, (gate, up))))


class GeluMLP(SplitMLP):
    """As ``SplitMLP`` with the tanh GELU."""

    uses = ("geglu_tanh",)
    activation = "gelu_tanh"

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """The tanh-GELU gate of two (B, S, F) tensors."""
        return kernels.geglu_tanh(gate, up)


class PackedMLP(KernelForward):
    """``swiglu_packed`` on one projection that gives gate and up."""

    uses = ("swiglu_packed",)

    linears: ClassVar[tuple[str, ...]]
    order: ClassVar[str] = "gate_up"

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, H) to (B, S, H)."""
        if self.decodes(x):
            return super().forward(x)
        packed, down = (getattr(self, name) for name in self.linears)
        return down(kernels.swiglu_packed(packed(x), order=self.order))


class SlicedMLP(KernelForward):
    """The gate's kernel on slices of one projection, or on what was clamped before.

    Attributes:
        form: how gate and up are given, and the names of the linears.
    """

    form: ClassVar[tuple[str, ...]]
    activation: ClassVar[str] = "silu"
    limits: ClassVar[Limits] = Limits()

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, H) to (B, S, H)."""
        if self.decodes(x):
            return super().forward(x)
        gate, up = self.limits.clamped(*_gate_and_up(self, self.form, x))
        alpha = self.limits.alpha
        if self.activation == "gelu_tanh":
            h = kernels.geglu_tanh(gate, up)
        elif alpha == 1.0:
            h = kernels.swiglu(gate, up)
        else:
            h = kernels.swiglu(gate * alpha, up) / alpha
        return getattr(self, self.form[-1])(h)


_Form = tuple[str, ...]
"""How gate and up are given, then the names of the linears."""


def find_gate(module: nn.Module, x: Tensor, result: Any) -> Finding | None:
    """What a module of two or three linear layers is; None for what has another shape.

    Args:
        module: in fp64; not kept, not changed.
        x: an input of it.
        result: what it gave.
    """
    forms = list(_forms(module))
    if not forms or not isinstance(result, Tensor) or x.shape != result.shape:
        return None
    lead = (2, 2) if x.dim() == 3 else (4,)
    scales = [1.0, 1e-3, 30.0]
    limit = _limit_of(module, x)
    if limit is not None:  # inputs that reach both sides of the clamps
        size = torch.cat(_gate_and_up(module, forms[0], x), -1).std().item()
        scales += [0.3 * limit / size, 4 * limit / size]
    inputs = [
        torch.cat([draw(*lead, x.shape[-1], seed=i, scale=s) for i, s in enumerate(scales)]).to(x)
    ]
    parameters = list(module.parameters())
    allowed = () if limit is None else ("clamp",)
    truth = Truth(module, inputs, parameters, allowed)
    if truth.error:
        return Finding("swiglu", "refused", truth.error[1])
    ran = [name for name in ("silu", "gelu") if name in truth.used]  # else it is written out
    candidates = [name for name in ACTIVATIONS if not ran or name.partition("_")[0] in ran]
    variants = (
        (form, name, made)
        for form, name, made in itertools.product(forms, candidates, limits_of(module, limit))
        if made.alpha == 1.0 or name == "silu"
    )
    fit = first_fit(truth, variants, lambda each: functools.partial(_gated, module, *each))
    error = fit.error
    if fit.reason:
        return Finding("swiglu", "refused", fit.reason)
    form, name, made = fit.variant
    if reason := why_not(module, fit.ours, inputs, allowed):
        return Finding("swiglu", "refused", reason, error)
    kind, *linears = form
    detail = f"{_told(name, made)}, {kind.replace('_', ', then ')}"
    forward: type[KernelForward] | None = None
    settings: dict[str, Any] = {"linears": tuple(linears)}
    if made != Limits() or kind == "interleaved" or (kind != "split" and name == "gelu_tanh"):
        if name in ("silu", "gelu_tanh"):
            forward = SlicedMLP
            op = "swiglu" if name == "silu" else "geglu_tanh"
            settings = {"form": form, "activation": name, "limits": made, "uses": (op,)}
    elif kind == "split":
        forward = {"silu": SplitMLP, "gelu_tanh": GeluMLP}.get(name)
    elif name == "silu":
        forward, settings["order"] = PackedMLP, kind
    if forward is None:
        return Finding("swiglu", "no kernel", f"{detail}: trainkit has no kernel for it", error)
    bits = None
    if forward is SlicedMLP:  # which may round elsewhere
        low = copy.deepcopy(module).to(torch.bfloat16)
        swapped = copy.deepcopy(low)
        swapped.__class__ = subclass_of(type(module), forward, settings)
        bits = share_of_other_bits(low, swapped, [inputs[0].to(torch.bfloat16)])
        detail += f"; {bits:.0%} of its bf16 results round otherwise" if bits else ""
    return Finding("swiglu", "on", detail, error, bits, forward, settings)


def _forms(module: nn.Module) -> Iterator[_Form]:
    """Every way in which its linear layers could be gate, up and down."""
    linears = {name: each for name, each in module.named_children() if type(each) is nn.Linear}
    inside = {id(parameter) for each in linears.values() for parameter in each.parameters()}
    if any(id(each) not in inside for each in module.parameters()):
        return
    if len(linears) == 3:
        for gate, up, down in itertools.permutations(linears):
            first, second, last = (linears[each] for each in (gate, up, down))
            if first.weight.shape == second.weight.shape == last.weight.shape[::-1]:
                yield "split", gate, up, down
    elif len(linears) == 2:
        for packed, down in itertools.permutations(linears):
            if linears[packed].out_features == 2 * linears[down].in_features:
                for kind in ("gate_up", "up_gate", "interleaved"):
                    yield kind, packed, down


def limits_of(module: nn.Module, limit: float | None) -> list[Limits]:
    """What a gate may do besides, from the numbers that its module holds."""
    if limit is None:
        return [Limits()]
    own = {each for each in vars(module).values() if isinstance(each, float)}
    alphas = dict.fromkeys([1.0, *own, 1.702])
    return [Limits(limit, *each) for each in itertools.product(alphas, (0.0, 1.0))]


def _told(activation: str, limits: Limits) -> str:
    detail = f"{activation}(gate) * up"
    detail += "" if limits.limit is None else f", clamped at {limits.limit:g}"
    detail += "" if limits.alpha == 1.0 else f", sigmoid of {limits.alpha:g} x"
    return detail + (f", up + {limits.offset:g}" if limits.offset else "")


def _limit_of(module: nn.Module, *x: Tensor) -> float | None:
    """The limit of a gate that clamps gate from above and up on both sides, and nothing else."""
    with torch.no_grad(), Wide() as mode, suppress(*FAILURES):
        module(*x)
    if len(mode.bounds) == 2:
        low, high = (tuple(each) for each in mode.bounds)
        for (_, first), both in ((low, high), (high, low)):
            is_number = isinstance(first, float | int) and first > 0
            if is_number and both == (-first, first) and (None, first) in (low, high):
                return float(first)
    return None


def _gate_and_up(module: nn.Module, form: _Form, x: Tensor) -> tuple[Tensor, Tensor]:
    kind, *linears = form
    inner = [getattr(module, name) for name in linears[:-1]]
    if kind == "split":
        gate, up = apply_linears(x, inner)
        return gate, up
    packed = inner[0](x)
    if kind == "interleaved":
        return packed[..., ::2], packed[..., 1::2]
    first, second = packed.chunk(2, -1)
    return (first, second) if kind == "gate_up" else (second, first)


def _gated(module: nn.Module, form: _Form, activation: str, made: Limits, x: Tensor) -> Tensor:
    """What a module would be in plain torch."""
    gate, up = made.clamped(*_gate_and_up(module, form, x))
    down: nn.Module = getattr(module, form[-1])
    alpha = made.alpha
    y: Tensor = down(ACTIVATIONS[activation](gate * alpha if alpha != 1.0 else gate) / alpha * up)
    return y


_LOOP = {"expert_hit", "hit", "expert_idx == self.num_experts"}
_OF_LOOP = frozenset(("nonzero", "__eq__", "__bool__"))
"""What the loop over experts that got a token decides by, in the source and as torch sees it."""

_FEW = 64
"""Fewer tokens than this without gradients are one step of decoding."""

_UNIT = 8
"""Sizes that the kernels can address, in 16 bits."""


class Experts(KernelForward):
    """The two grouped products, the gate and the sum in one op.

    Attributes:
        sorted_rows: whether it is given rows for each expert in turn, and no routes. A row of zeros
            then gives zeros, and no gradient, so it is sent to no expert.
    """

    uses = ("moe_mlp",)

    weights: ClassVar[tuple[str, str]]
    biases: ClassVar[tuple[str, ...]] = ()
    options: ClassVar[tuple[tuple[str, Any], ...]] = ()
    sorted_rows: ClassVar[bool] = False

    @property
    def transposed(self) -> bool:
        return bool(dict(self.options).get("transposed"))

    def keeps_own(self, x: Tensor, rank: int = 0) -> bool:
        """Whether Hugging Face's, or peft's, code runs on so many tokens of such a kind."""
        if torch.compiler.is_compiling():
            return True
        if not self.training and not torch.is_grad_enabled() and x.shape[0] < _FEW:
            return True
        gate_up, down = (stack_of(self, name) for name in self.weights)
        loops = x.is_cuda and x.dtype != torch.float64
        packed = isinstance(gate_up, Packed) or isinstance(down, Packed)
        return (loops or packed) and why_no_kernel(x, gate_up, down, rank) is not None

    def compute(
        self,
        x: Tensor,
        routes: tuple[Tensor, ...],
        factors: Sequence[Tensor | None] = (None,) * 4,
        **adapters: Any,
    ) -> Tensor:
        """The op on these experts.

        Args:
            x: as the forward takes it.
            routes: what else the forward takes: (T, K) experts and what they count.
            factors: the op's, of adapters.
            adapters: what else the op takes of them.
        """
        gate_up, down = (stack_of(self, name) for name in self.weights)
        if self.sorted_rows:
            routes = _routes_of_rows(x, gate_up.shape[0])
        biases = [getattr(self, name) for name in self.biases]
        return kernels.moe_mlp(
            x, *routes, gate_up, down, *factors, *biases, **adapters, **dict(self.options)
        )

    def forward(self, hidden_states: Tensor, *routes: Tensor, **named: Tensor) -> Tensor:
        """(T, H), (T, K), (T, K) to (T, H)."""
        if named or self.keeps_own(hidden_states):
            return super().forward(hidden_states, *routes, **named)
        return self.compute(hidden_states, routes)


def _routes_of_rows(x: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Those of the same number of rows for each expert in turn."""
    expert = torch.arange(num_experts, device=x.device).repeat_interleave(len(x) // num_experts)
    index = torch.where((x != 0).any(1), expert, num_experts)
    return index[:, None], x.new_ones((len(x), 1))


def find_experts(module: nn.Module, tensors: list[Tensor], result: Any) -> Finding | None:
    """What a module with parameters of three dimensions of its own is; None for what has none.

    Args:
        module: in fp64; not kept, not changed.
        tensors: what it was called with.
        result: what it gave.
    """
    own = dict(module.named_parameters(recurse=False))
    stacks = {name: each for name, each in own.items() if each.dim() == 3}
    sizes = {each.shape[0] for each in stacks.values()}
    if len(stacks) < 2 or len(sizes) > 1 or type(module).__module__.startswith("torch."):
        return None
    is_routed = tensors[0].dim() == 2 and any(not each.is_floating_point() for each in tensors)
    if not is_routed and "expert" not in type(module).__name__.lower():
        return None  # blocks of something else, as of a recurrent gate
    (num_experts,), (x, *rest) = sizes, tensors
    is_sorted = not rest and x.dim() == 2 and len(x) % num_experts == 0
    if not is_sorted and (
        len(rest) != 2
        or x.dim() != 2
        or rest[0].is_floating_point()
        or not rest[0].shape == rest[1].shape == (x.shape[0], rest[0].shape[-1])
    ):
        return Finding("experts", "refused", "its experts do not take tokens with their routes")
    if not isinstance(result, Tensor) or x.shape != result.shape:
        return Finding("experts", "refused", "its experts give something else than tokens")
    top_k = 1 if is_sorted else rest[0].shape[1]
    limit = _limit_of(module, *([x] if is_sorted else [x[:1], rest[0][:1, :1], rest[1][:1, :1]]))
    inputs, routes = _expert_inputs(stacks, limit, top_k, x, is_sorted)

    def plain(x: Tensor, *scale: Tensor) -> list[Tensor]:
        if is_sorted:
            return [module(x)]
        return [module(x, each, scale[0][:, : each.shape[1]]) for each in routes]

    allowed = _OF_LOOP if limit is None else _OF_LOOP | {"clamp"}
    truth = Truth(plain, inputs, own.values(), allowed)
    if truth.error:
        return Finding("experts", "refused", truth.error[1])

    def ours(form: Any, x: Tensor, *scale: Tensor) -> list[Tensor]:
        names, biases, options = form
        weights = [getattr(module, name) for name in (*names, *biases)]
        args = (*weights[:2], *(None,) * 4, *weights[2:])
        if is_sorted:
            return [moe_mlp_reference(x, *_routes_of_rows(x, num_experts), *args, **options)]
        pairs = [(each, scale[0][:, : each.shape[1]]) for each in routes]
        return [moe_mlp_reference(x, *pair, *args, **options) for pair in pairs]

    forms = _expert_forms(own, x.shape[1], limits_of(module, limit))
    fit = first_fit(truth, forms, lambda form: functools.partial(ours, form))
    error = fit.error
    if fit.reason:
        return Finding("experts", "refused", fit.reason)
    names, biases, options = fit.variant
    left = [each for each in decisions(module) if each not in _LOOP]
    if reason := why_not(module, fit.ours, inputs, allowed, left, plain=plain):
        return Finding("experts", "refused", reason, error)
    detail = _told(options["activation"], options["limits"])
    detail += ", interleaved" if options["interleaved"] else ""
    detail += ", then down" + (", both with a bias" if biases else "")
    if odd := [size for each in stacks.values() for size in each.shape[1:] if size % _UNIT]:
        return Finding(
            "experts", "no kernel", f"{detail}: its {odd[0]} is no multiple of {_UNIT}", error
        )
    settings = {"weights": names, "biases": biases, "sorted_rows": is_sorted}
    settings["options"] = tuple(sorted(options.items()))
    return Finding("experts", "on", detail, error, None, Experts, settings)


_SCALES = (1.0, 1e-3, 30.0)


def _expert_inputs(
    stacks: dict[str, nn.Parameter], limit: float | None, top_k: int, x: Tensor, is_sorted: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Tokens, with their scales, of sizes that reach both sides of a clamp; and routes."""
    scales, (num_experts, *_) = list(_SCALES), next(iter(stacks.values())).shape
    hidden = x.shape[1]
    if limit is not None:
        spread = next(iter(stacks.values())).std().item() * hidden**0.5
        scales += [each * limit / max(spread, 1e-30) for each in (0.3, 4.0)]
    if is_sorted:
        num = num_experts * len(scales)
        rows = draw(num, hidden) * torch.tensor(scales).repeat(num_experts)[:, None]
        rows[1::4] = 0.0
        return [rows.to(x)], []
    routes = list(expert_routes(num_experts, top_k, x.device, 4 * len(scales)))
    rows = torch.cat([draw(4, hidden, seed=i, scale=s) for i, s in enumerate(scales)])
    return [each.to(x) for each in (rows, draw(len(rows), top_k, seed=5).abs())], routes


def expert_routes(
    num_experts: int, top_k: int, device: torch.device, num: int = 12
) -> Iterator[Tensor]:
    order = draw(num, num_experts, seed=9).argsort(1)[:, :top_k]
    yield order.to(device)
    yield torch.arange(num_experts - top_k, num_experts, device=device).expand(num, top_k)
    yield torch.zeros((num, 1), dtype=torch.long, device=device)


def _expert_forms(
    own: dict[str, nn.Parameter], hidden: int, limits: Sequence[Limits]
) -> Iterator[tuple[tuple[str, str], tuple[str, ...], dict[str, Any]]]:
    """Every way in which parameters could be the op's weights and biases, and its options."""
    stacks = {name: each for name, each in own.items() if each.dim() == 3}
    flat = [name for name in own if name not in stacks]
    for (first, gate_up), (second, down) in itertools.permutations(stacks.items(), 2):
        for transposed in (False, True):
            shapes = [tuple(each.shape[1:]) for each in (gate_up, down)]
            if transposed:
                shapes = [each[::-1] for each in shapes]
            width = shapes[1][1]
            if len(stacks) > 2 or shapes != [(2 * width, hidden), (hidden, width)]:
                continue
            for biases in itertools.permutations(flat):
                outputs = [tuple(own[name].shape) for name in biases]
                if biases and outputs != [(len(gate_up), each[0]) for each in shapes]:
                    continue
                for activation, interleaved, each in itertools.product(
                    EXPERT_ACTIVATIONS, (False, True), limits
                ):
                    if each.alpha == 1.0 or activation == "silu":
                        yield (
                            (first, second),
                            biases,
                            {
                                "activation": activation,
                                "interleaved": interleaved,
                                "limits": each,
                                "transposed": transposed,
                            },
                        )
