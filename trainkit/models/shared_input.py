"""Linear layers that read the same input: q, k and v, or gate and up.

Called one by one, each leaves a gradient of the whole input, and autograd adds these up: two reads
and a write per layer for nothing but a sum. Here the matrix products add up themselves. Layers with
few outputs (k and v under grouped heads), whose products are bound by reading the input, share one
product. The weights stay as they are, parameters of their own.

T tokens, H hidden, N the outputs of a layer.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules import module as module_hooks

from trainkit.kernels.autocast import compute_dtype
from trainkit.kernels.launch import is_plain
from trainkit.kernels.sums import column_sums
from trainkit.models.fp8.trained import TrainedFp8, feed_forward_in_fp8, together


def apply_linears(x: Tensor, layers: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    """The outputs of layers that share their input.

    Plain linear layers run together, those that train in fp8 among them. Where one is adapted or
    quantised, carries hooks (ZeRO-3 gathers weights in them) or computes in another dtype, each is
    called as the module it is; so they are without gradients and under torch.compile, which adds up
    by itself.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return tuple(layer(x) for layer in layers)
    linears = [layer for layer in layers if isinstance(layer, nn.Linear) and _is_plain(layer, x)]
    if len(linears) < len(layers):
        return tuple(layer(x) for layer in layers)
    if any(isinstance(layer, TrainedFp8) for layer in linears):
        return together(x, linears)
    weights = [layer.weight for layer in linears]
    return _Linears.apply(x, _num_alone(weights), *weights, *(layer.bias for layer in linears))


def apply_feed_forward(
    x: Tensor, gate: nn.Module, up: nn.Module, down: nn.Module, *, tanh_gelu: bool
) -> Tensor | None:
    """A feed-forward block whose layers all train in fp8, as one function.

    Returns:
        (..., H); None where the layers have to be called one by one, as `apply_linears` decides it.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    layers = [
        layer
        for layer in (gate, up, down)
        if isinstance(layer, nn.Linear) and _trains_in_fp8(layer) and _is_plain(layer, x)
    ]
    return feed_forward_in_fp8(x, layers, tanh_gelu=tanh_gelu) if len(layers) == 3 else None


def _is_plain(layer: nn.Linear, x: Tensor) -> bool:
    """Whether calling the module means ``linear(x, weight, bias)`` and nothing else."""
    hooks = (
        layer._forward_hooks,
        layer._forward_pre_hooks,
        layer._backward_hooks,
        layer._backward_pre_hooks,
    )
    return (
        (type(layer) is nn.Linear or _trains_in_fp8(layer))
        and "forward" not in layer.__dict__
        and not any(hooks)
        and not module_hooks._has_any_global_hook()
        and is_plain(x)
        and is_plain(layer.weight)
        and layer.weight.dtype == x.dtype == compute_dtype(x)
    )


def _trains_in_fp8(layer: nn.Linear) -> bool:
    """Whether fp8 products are all that lies on the plain layer."""
    return isinstance(layer, TrainedFp8) and type(layer).__mro__[2] is nn.Linear


def _num_alone(weights: Sequence[Tensor]) -> int:
    """How many of the first layers get their own product; the rest share one.

    Sharing copies the gradients side by side, which pays where they are narrow next to the first.
    """
    narrow = [weight.shape[0] * 2 <= weights[0].shape[0] for weight in weights]
    return 1 if len(weights) > 2 and all(narrow[1:]) else len(weights)


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, num_alone: int, *parameters: Tensor | None) -> Any:
        ctx.set_materialize_grads(False)
        ctx.num_alone = num_alone
        weights, biases = _halves(parameters)
        ctx.save_for_backward(x, *weights)
        outputs: list[Tensor] = []
        for part in _parts(range(len(weights)), num_alone):
            weight = _joined([weights[i] for i in part])
            product = functional.linear(x, weight, _joined([biases[i] for i in part]))
            # Copies of what follows the first: who keeps v must not keep k's memory with it.
            first, *others = _split(product, [weights[i] for i in part], dim=-1)
            outputs += [first, *(each.contiguous() for each in others)]
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        x, *weights = ctx.saved_tensors
        count = len(weights)
        want_dx, _, *wanted = ctx.needs_input_grad
        want_dweights, want_dbiases = _halves(wanted)
        rows = x.reshape(-1, x.shape[-1])
        dx: Tensor | None = None
        dweights: list[Tensor | None] = [None] * count
        dbiases: list[Tensor | None] = [None] * count
        reached = {i: dy.reshape(len(rows), -1) for i, dy in enumerate(gradients) if dy is not None}
        for part in _parts(reached, ctx.num_alone):
            dy = _joined([reached[i] for i in part], dim=1)
            its_weights = [weights[i] for i in part]
            if want_dx:
                weight = _joined(its_weights)
                dx = torch.mm(dy, weight) if dx is None else dx.addmm_(dy, weight)
            if any(want_dweights[i] for i in part):
                for i, dweight in zip(part, _split(dy.t() @ rows, its_weights), strict=True):
                    dweights[i] = dweight if want_dweights[i] else None
            if any(want_dbiases[i] for i in part):
                for i, dbias in zip(part, _split(column_sums(dy), its_weights), strict=True):
                    dbiases[i] = dbias if want_dbiases[i] else None
        return None if dx is None else dx.view(x.shape), None, *dweights, *dbiases


def _halves(values: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    half = len(values) // 2
    return values[:half], values[half:]


def _parts(layers: Iterable[int], num_alone: int) -> list[list[int]]:
    """Which layers run in one product: the first ones each by itself, then the rest together."""
    layers = list(layers)
    together = [i for i in layers if i >= num_alone]
    return [[i] for i in layers if i < num_alone] + ([together] if together else [])


def _joined(tensors: Sequence[Any], dim: int = 0) -> Any:
    return tensors[0] if len(tensors) == 1 or tensors[0] is None else torch.cat(list(tensors), dim)


def _split(tensor: Tensor, weights: Sequence[Tensor], dim: int = 0) -> Sequence[Tensor]:
    """The parts of a product's result that belong to its weights."""
    if len(weights) == 1:
        return [tensor]
    return tensor.split([weight.shape[0] for weight in weights], dim)
