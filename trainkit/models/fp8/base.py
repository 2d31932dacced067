"""A frozen base in e4m3: one byte a weight, with a scale for each output.

The base is read as it was saved and quantised layer by layer, so a GPU never holds more than one
layer in 16 bits. Each layer is then compared with what it was: the weight itself, and its product
in both directions on random rows. `describe_fp8` gives the errors to ``kernels.json``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.errors import ModelError
from trainkit.kernels.fp8.function import fits_fp8, fp8_quantize, fp8_transpose
from trainkit.kernels.fp8.linear import Fp8Weight, SharedInput, fp8_input_gradient
from trainkit.kernels.fp8.trained import fp8_weight_gradient
from trainkit.kernels.lora.function import lora_linear
from trainkit.kernels.lora.products import Projection
from trainkit.patterns import ends_in


class Fp8Linear(nn.Linear):
    """A frozen linear layer whose weight is kept as e4m3 codes, uint8 (N, K).

    Both directions multiply in fp8 (`Fp8Weight`); on a CPU that is emulated, with the same numbers
    except the order of sums.
    """

    scale_bits: Tensor
    errors: Fp8Errors

    def __init__(self, linear: nn.Linear, device: torch.device) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach().to(device)
        codes, scales = fp8_quantize(weight)
        self.weight = nn.Parameter(codes.view(torch.uint8), requires_grad=False)
        # As bits, which no cast of the model to another dtype touches.
        self.register_buffer("scale_bits", scales.view(torch.int32))
        bias = linear.bias
        self.bias = None if bias is None else nn.Parameter(bias.detach().to(device), False)
        self.errors = layer_errors(weight, codes, scales)

    def reader(self) -> Fp8Weight:
        return Fp8Weight(self.scale_bits.view(torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """``x W^T + b``: (..., K) to (..., N)."""
        return lora_linear(x, Projection(self.weight, self.bias, unpack=self.reader()))


def why_not_fp8(name: str, linear: nn.Linear, head: nn.Module | None, kept: Collection[str]) -> str:
    """Why a linear layer keeps its 16 bits; empty where it need not."""
    if linear is head:
        return "the output layer"
    if ends_in(name, kept):
        return "trained whole (modules_to_save)"
    if not fits_fp8(linear.out_features, linear.in_features):
        return "the tensor cores take multiples of 16 only"
    return ""


def quantize_to_fp8(model: nn.Module, device: torch.device, kept: Collection[str] = ()) -> None:
    """Replace the linear layers of a loaded model by ones in e4m3, in place.

    The output layer and shapes that do not fit stay as they are.
    """
    get_head = getattr(model, "get_output_embeddings", None)
    head = None if get_head is None else get_head()
    number = 0
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear or why_not_fp8(name, module, head, kept):
            continue
        packed = Fp8Linear(module, device)
        packed.train(module.training)
        if not packed.errors.ok:
            raise ModelError(
                f"{name} in fp8 is off by {packed.errors.weight:.1%} (weight; at most "
                f"{WEIGHT_LIMIT:.1%}), {packed.errors.forward:.1%} (output) and "
                f"{packed.errors.backward:.1%} (input gradient; at most {PRODUCT_LIMIT:.1%})",
                where="lora.quantize: fp8",
                fix="look for NaN in the weights; train without lora.quantize",
            )
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, packed)
        number += 1
    if not number:
        raise ModelError(
            "the model has no plain linear layer whose sizes are multiples of 16",
            where="lora.quantize: fp8",
            fix="remove lora.quantize",
        )


def describe_fp8(model: nn.Module) -> dict[str, Any]:
    """What of a model is in fp8, by shape, and the largest errors, for ``kernels.json``."""
    return describe_errors(
        ((module.out_features, module.in_features), module.errors)
        for module in model.modules()
        if isinstance(module, Fp8Linear)
    )


WEIGHT_LIMIT = 2.0**-4 + 2.0**-10
"""A code is at most half a step of 3 bits off, a sixteenth of the number; what is below the range
of the row's scale adds less than 2^-10 of the row at any width."""
PRODUCT_LIMIT = math.sqrt(2) * WEIGHT_LIMIT + 2.0**-8
"""Both operands are rounded, independently, so the squares add; and the result, to bf16. Relative
to the root of x^2 (W^2)^T, which is the size of a product whose terms do not cancel."""
_PROBE_ROWS = 32


@dataclass(frozen=True)
class Fp8Errors:
    """How far a layer is from its plain self, relative, in the Euclidean norm.

    Attributes:
        forward: of x W^T on random rows.
        backward: of dy W on random rows.
        weight_gradient: of dy^T x on random rows; 0 where the weight is not trained.
    """

    weight: float
    forward: float
    backward: float
    weight_gradient: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether each is within its limit; false for NaN."""
        products = (self.forward, self.backward, self.weight_gradient)
        return self.weight <= WEIGHT_LIMIT and all(error <= PRODUCT_LIMIT for error in products)


@torch.no_grad()
def layer_errors(
    weight: Tensor, codes: Tensor, scales: Tensor, *, trained: bool = False
) -> Fp8Errors:
    """Compare codes with the weight (N, K) that they stand for, and their products, in fp32."""
    reader, exact = Fp8Weight(scales), weight.float()
    storage = codes.view(torch.uint8)
    generator = torch.Generator(weight.device).manual_seed(0)

    def probe(width: int) -> Tensor:
        shape = (_PROBE_ROWS, width)
        return torch.randn(shape, generator=generator, device=weight.device).bfloat16()

    x, dy = probe(weight.shape[1]), probe(weight.shape[0])
    y = reader.product(SharedInput(x), storage, None)
    dx = fp8_input_gradient([(dy, storage, reader)])
    squares, wide_x, wide_dy = exact.square(), x.float(), dy.float()
    gradient = 0.0
    if trained:
        x_codes, x_scales = fp8_quantize(x)
        dw = fp8_weight_gradient(dy, x_scales, fp8_transpose([x_codes]))
        size = (wide_dy.square().t() @ wide_x.square()).sqrt()
        gradient = _share(dw - wide_dy.t() @ wide_x, size)
    return Fp8Errors(
        _share(reader(storage, torch.float32) - exact, exact),
        _share(y - wide_x @ exact.t(), (wide_x.square() @ squares.t()).sqrt()),
        _share(dx - wide_dy @ exact, (wide_dy.square() @ squares).sqrt()),
        gradient,
    )


def describe_errors(layers: Iterable[tuple[tuple[int, int], Fp8Errors]]) -> dict[str, Any]:
    """The largest errors of layers by shape (N, K), for ``kernels.json``."""
    shapes: dict[tuple[int, int], list[Fp8Errors]] = defaultdict(list)
    for shape, errors in layers:
        shapes[shape].append(errors)
    return {
        "layers": [
            {
                "num_outputs": shape[0],
                "num_inputs": shape[1],
                "number": len(errors),
                "weight_error": max(each.weight for each in errors),
                "forward_error": max(each.forward for each in errors),
                "backward_error": max(each.backward for each in errors),
                "weight_gradient_error": max(each.weight_gradient for each in errors),
            }
            for shape, errors in shapes.items()
        ],
        "weight_limit": WEIGHT_LIMIT,
        "product_limit": PRODUCT_LIMIT,
    }


def _share(difference: Tensor, whole: Tensor) -> float:
    norm = whole.norm().item()
    return difference.norm().item() / norm if norm != 0.0 else 0.0
