"""Linear attention by a gated delta rule: Hugging Face's own forward over packed documents.

Its convolution over the sequence and its recurrence are functions of the modeling file. Ours in
their place take the boundaries of documents, which the plain ones ignore or refuse; all else stays
as it is written. Without boundaries each row is one document, as in the plain model.

Shapes: B batch, S sequence, C channels.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainkit import kernels
from trainkit.auto_class import FAILURES
from trainkit.evaluation_mode import changed
from trainkit.models.proof.compare import BRANCHES, Finding, Truth, draw
from trainkit.models.proof.source import methods, names_in, redirected
from trainkit.models.swap import KernelForward, plain_class, subclass_of
from trainkit.parallel.parameters import whole_shape

_EXACT = 1e-6
"""In fp64: where decays are strong, the plain layer forms their small gradients from sums that are
a million times as large, and is off by 1e-9 itself."""
_LENGTHS = (3, 1, 66)
"""Of the documents of the proof: within the convolution's reach, one token, more than a chunk."""


def delta_functions(kind: type[nn.Module]) -> dict[str, str]:
    """The names in a class's forward of its "rule" and its "conv"; empty if it has not both."""
    used = names_in(inspect.unwrap(kind.forward).__code__)
    found = {"rule": "torch_chunk_gated_delta_rule", "conv": "causal_conv1d_fn"}
    return found if used.issuperset(found.values()) else {}


class DeltaNet(KernelForward):
    """Hugging Face's forward with ``causal_conv`` and ``gated_delta_rule`` in it."""

    uses = ("causal_conv", "gated_delta_rule")
    keeps_documents_apart = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if len(cls.__bases__) == 2 and cls.__bases__[0] is DeltaNet:
            below: Any = cls.__bases__[1]
            names = delta_functions(below)
            scope = inspect.unwrap(below.forward).__globals__
            ours = {
                names["rule"]: _rule(scope[names["rule"]]),
                names["conv"]: _conv(scope[names["conv"]]),
            }
            for name, method in methods(below):
                if names_in(inspect.unwrap(method).__code__) & ours.keys():
                    setattr(cls, name, redirected(method, ours))
        super().__init_subclass__(**kwargs)


@functools.lru_cache(maxsize=8)
def _rows(batch: int, length: int, device: torch.device) -> Tensor:
    """The boundaries of a batch whose rows are documents."""
    return torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device)


def _conv(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(plain)
    def causal_conv1d(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """(B, C, S) to (B, C, S)."""
        if activation not in (None, "silu", "swish"):
            return plain(hidden_states, weight, bias, activation, **kwargs)
        batch, channels, length = hidden_states.shape
        bounds = _rows(batch, length, weight.device) if cu_seq_lens_q is None else cu_seq_lens_q
        if torch.is_autocast_enabled(weight.device.type):
            weight = weight.to(hidden_states.dtype)
            bias = None if bias is None else bias.to(hidden_states.dtype)
        x = hidden_states.transpose(1, 2).reshape(batch * length, channels).to(weight.dtype)
        y = kernels.causal_conv(
            x, weight, bounds, bias, activation=None if activation is None else "silu"
        )
        return y.view(batch, length, channels).transpose(1, 2).to(hidden_states.dtype)

    return causal_conv1d


def _rule(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def chunk_gated_delta_rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """(B, S, heads, size) to the same."""
        if initial_state is not None or output_final_state:  # generation
            given = {"initial_state": initial_state, "output_final_state": output_final_state}
            given["use_qk_l2norm_in_kernel"] = use_qk_l2norm_in_kernel
            return plain(query, key, value, g=g, beta=beta, **given, **kwargs)
        batch, length = value.shape[:2]
        bounds = _rows(batch, length, value.device) if cu_seqlens is None else cu_seqlens
        flat = (x.flatten(0, 1) for x in (query, key, value, g, beta))
        o = kernels.gated_delta_rule(*flat, bounds, normalize=use_qk_l2norm_in_kernel)
        return o.unflatten(0, (batch, length)), None

    return chunk_gated_delta_rule


def find_delta(module: nn.Module, x: Tensor, result: Any) -> Finding | None:
    """What a layer that calls the two functions is.

    Proved on its own weights in fp64: rows as documents against the plain layer, outputs and every
    gradient; then documents end to end, each against the plain layer that has it alone.
    """
    if not delta_functions(type(module)) or not isinstance(result, Tensor):
        return None
    kind = subclass_of(type(module), DeltaNet)
    bounds = torch.tensor([0, *_LENGTHS], device=x.device).cumsum(0).int()

    def ours(x: Tensor, **kwargs: Any) -> Tensor:
        with changed([(module, "__class__", kind)]):
            y: Tensor = module(x, **kwargs)
            return y

    def alone(x: Tensor) -> Tensor:
        return torch.cat([module(document) for document in x.split(_LENGTHS, 1)], 1)

    packed = functools.partial(ours, cu_seq_lens_q=bounds)
    error = 0.0
    comparisons: tuple[tuple[Any, ...], ...] = (
        ((2, max(_LENGTHS)), module, ours),
        ((1, sum(_LENGTHS)), alone, packed),
    )
    for shape, plain, other in comparisons:
        inputs = [draw(*shape, x.shape[-1], seed=5).to(x.device)]
        truth = Truth(plain, inputs, module.parameters(), BRANCHES)
        off, why = truth.error or truth.against(other)
        if why:
            return Finding("gated_delta_rule", "refused", f"it cannot be compared: {why}")
        error = max(error, off)
    if not error < _EXACT:
        reason = f"its rule is another one: off by {error:.0e}"
        return Finding("gated_delta_rule", "refused", reason, error)
    return Finding("gated_delta_rule", "on", "documents are kept apart", error, None, DeltaNet, {})


def gate_projections(module: nn.Module, width: int) -> frozenset[str]:
    """Names, within a layer, of the linear layers that only make its decays and its beta.

    Found by autograd: with a rule that passes decay and beta by, no gradient of the layer's output
    reaches them. It runs on a twin on the meta device, so the weights may be packed or elsewhere;
    ``width`` is that of the model's hidden states.
    """
    kind = plain_class(module)
    names = delta_functions(kind)
    if not names:
        return frozenset()

    def rule(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> tuple[Tensor, None]:
        return value * (query * key).sum((-1, -2))[..., None, None], None

    def conv(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states

    made: dict[str, Tensor] = {}
    twin = _on_meta(module)
    linears = {name: each for name, each in twin.named_modules() if isinstance(each, nn.Linear)}
    for name, linear in linears.items():
        linear.register_forward_hook(lambda _, __, y, name=name: made.__setitem__(name, y))
    ours = {names["rule"]: rule, names["conv"]: conv}
    for name, method in methods(kind):
        if names_in(inspect.unwrap(method).__code__) & ours.keys():
            setattr(twin, name, redirected(method, ours).__get__(twin))
    with torch.enable_grad(), contextlib.suppress(*FAILURES):
        y = twin.forward(torch.empty(1, 2, width, device="meta"))
        gradients = torch.autograd.grad([y.sum()], [*made.values()], allow_unused=True)
        return frozenset(name for name, dy in zip(made, gradients, strict=True) if dy is None)
    return frozenset()  # it cannot be told


def _on_meta(module: nn.Module) -> nn.Module:
    """A module's twin without weights, hooks and what is swapped in, in fp32."""
    if isinstance(module, nn.Linear):
        bias = module.bias is not None
        return nn.Linear(module.in_features, module.out_features, bias, device="meta")
    kind = plain_class(module)
    twin: nn.Module = kind.__new__(kind)
    nn.Module.__init__(twin)
    own = {key: value for key, value in vars(module).items() if key not in vars(twin)}
    vars(twin).update(own)
    for name, weight in module._parameters.items():
        shape = None if weight is None else whole_shape(weight)
        empty = None if shape is None else nn.Parameter(torch.empty(shape, device="meta"))
        twin.register_parameter(name, empty)
    for name, buffer in module._buffers.items():
        twin.register_buffer(name, None if buffer is None else buffer.to("meta"))
    for name, child in module.named_children():
        setattr(twin, name, _on_meta(child))
    return twin


@contextmanager
def documents_apart(model: nn.Module) -> Iterator[None]:
    """Within, the layers that can keep packed documents apart do, before anything is proved."""
    changes = [
        (module, "__class__", subclass_of(type(module), DeltaNet))
        for module in model.modules()
        if not isinstance(module, DeltaNet) and delta_functions(type(module))
    ]
    with changed(changes):
        yield
