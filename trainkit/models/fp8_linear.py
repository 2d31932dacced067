"""A frozen base in e4m3: one byte a weight, with a scale for each output.

The base is read as it was saved and quantised layer by layer, so a GPU never holds more than one
layer in 16 bits. Each layer is then compared with what it was: the weight itself, and its product
in both directions on random rows. `describe_fp8` gives the errors to ``kernels.json``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.errors import ModelError
from trainkit.kernels.fp8.function import fits_fp8, fp8_quantize
from trainkit.kernels.fp8.linear import Fp8Weight
from trainkit.kernels.lora.function import lora_linear
from trainkit.kernels.lora.products import Projection
from trainkit.models.fp8.errors import (
    PRODUCT_LIMIT,
    WEIGHT_LIMIT,
    Fp8Errors,
    describe_errors,
    layer_errors,
)


class Fp8Linear(nn.Linear):
    """A frozen linear layer whose weight is kept as e4m3 codes, uint8 (N, K).

    Both directions multiply in fp8 (`Fp8Weight`); on a CPU that is emulated, with the same numbers
    except the order of sums.
    """

    scale_bits: Tensor
    errors: Fp8Errors

    def __init__(self, linear: nn.Linear, device: torch.device) -> None:
        """Quantise a layer.

        Args:
            linear: the layer; left as it is.
            device: where the codes go.
        """
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
    if any(name == each or name.endswith(f".{each}") for each in kept):
        return "trained whole (modules_to_save)"
    if not fits_fp8(linear.out_features, linear.in_features):
        return "the tensor cores take multiples of 16 only"
    return ""


def quantize_to_fp8(model: nn.Module, device: torch.device, kept: Collection[str] = ()) -> None:
    """Replace the linear layers of a loaded model by ones in e4m3, in place.

    Args:
        model: on any device; the output layer and shapes that do not fit stay as they are.
        device: where the codes go.
        kept: names of modules, or their ends, that stay as they are.

    Raises:
        ModelError: there is nothing to quantise; or a layer is further from what it was than
            rounding explains: its weights are not numbers, or this device multiplies wrongly.
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
