"""A linear layer that trains with fp8 products, as a class that is swapped in.

Weights, their names and checkpoints stay what they are. In evaluation mode the layer is the plain
one: what is saved is a 16-bit model, and is judged as that.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainkit.kernels.fp8.feed_forward import fp8_feed_forward
from trainkit.kernels.fp8.trained import Codes, Directions, fp8_linears, quantize_weight
from trainkit.models.swap import Swaps, subclass_of
from trainkit.parallel.parameters import is_whole


class TrainedFp8(nn.Module):
    """``nn.Linear`` with products in fp8.

    Attributes:
        in_evaluation: whether fp8 is kept in evaluation mode, to measure what it costs.
        kept: holds codes from one use to the next; None quantises at each use.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    forward_in_fp8: ClassVar[bool] = True
    backward_in_fp8: ClassVar[bool] = True
    in_evaluation: ClassVar[bool] = False
    kept: "KeptCodes | None" = None

    @property
    def runs_fp8(self) -> bool:
        """Whether a call now multiplies in fp8."""
        return self.training or self.in_evaluation

    def directions(self) -> Directions:
        return Directions(self.forward_in_fp8, self.backward_in_fp8, self.codes)

    def codes(self, weight: Tensor) -> Codes:
        if self.kept is None:
            return quantize_weight(weight)
        return self.kept.of(self, weight)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``x W^T + b``: (..., K) to (..., N); an output layer may be asked for its loss."""
        if not self.runs_fp8 or args or kwargs:
            out: Tensor = super().forward(x, *args, **kwargs)
            return out
        return fp8_linears(x, (self.weight,), (self.bias,), (self.directions(),))[0]


class KeptCodes:
    """Codes of a model's weights, made once between two optimizer steps.

    Who changes weights has to say so: their version counters do not, since optimizers and engines
    write past them.
    """

    def __init__(self, model: nn.Module) -> None:
        """Keep the codes of the layers whose weights this process holds."""
        self._codes: dict[nn.Module, Codes] = {}
        self._layers = [
            module
            for module in model.modules()
            if isinstance(module, TrainedFp8) and is_whole(module.weight)
        ]
        for layer in self._layers:
            layer.kept = self

    def of(self, layer: nn.Module, weight: Tensor) -> Codes:
        """A layer's codes, made at the first use after a change."""
        found = self._codes.get(layer)
        if found is None:
            found = self._codes[layer] = quantize_weight(weight)
        return found

    def weights_changed(self) -> None:
        """Forget all codes; to be called whenever weights may have changed."""
        self._codes.clear()

    def stop(self) -> None:
        """Have the layers quantise at each use again."""
        self.weights_changed()
        for layer in self._layers:
            if layer.kept is self:
                del layer.kept


def swap_in(
    model: nn.Module, directions: Mapping[str, tuple[bool, bool]], *, in_evaluation: bool = False
) -> Swaps:
    plan: dict[nn.Module, type[Any]] = {}
    for name, (forward, backward) in directions.items():
        module = model.get_submodule(name)
        settings = {
            "forward_in_fp8": forward,
            "backward_in_fp8": backward,
            "in_evaluation": in_evaluation,
        }
        plan[module] = subclass_of(type(module), TrainedFp8, settings)
    return Swaps(model, plan)


def together(x: Tensor, layers: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    """The outputs of layers that share x; those that are not in fp8 now are plain linear layers."""
    chosen = [
        layer.directions() if isinstance(layer, TrainedFp8) and layer.runs_fp8 else Directions()
        for layer in layers
    ]
    weights: list[Any] = [layer.weight for layer in layers]
    biases: list[Any] = [layer.bias for layer in layers]
    return fp8_linears(x, weights, biases, chosen)


def feed_forward_in_fp8(
    x: Tensor, layers: Sequence[nn.Module], *, tanh_gelu: bool
) -> Tensor | None:
    """A feed-forward block in one function; None where its layers' states do not allow it."""
    gate, up, down = layers
    for layer in layers:
        if not (isinstance(layer, TrainedFp8) and layer.runs_fp8 and layer.backward_in_fp8):
            return None
    if x.dtype != torch.bfloat16 or gate.bias is not None or up.bias is not None:
        return None
    weights: list[Any] = [layer.weight for layer in layers]
    directions = [layer.directions() for layer in layers if isinstance(layer, TrainedFp8)]
    bias: Any = down.bias
    return fp8_feed_forward(x, weights, bias, directions, tanh_gelu=tanh_gelu)
