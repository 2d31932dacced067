"""The contract of causal_conv."""

from typing import Any

import torch
from op_cases.op import Case, tried
from torch import Tensor

from trainkit.kernels.contract import Draw


def conv_case(
    label: str,
    lengths: tuple[int, ...],
    channels: int,
    *,
    taps: int = 4,
    bias: bool = False,
    sliced: bool = False,
    frozen: bool = False,
    large: bool = False,
    **options: Any,
) -> Case:
    """A call on documents of these lengths."""

    def inputs(draw: Draw) -> dict[str, Tensor]:
        width = 3 * channels if sliced else channels
        bounds = torch.tensor([0, *lengths], device=draw.device).cumsum(0).int()
        tensors = {
            "x": draw.normal(sum(lengths), width)[:, :channels],
            "weight": draw.normal(channels, taps, scale=0.5),
            "cu_seqlens": bounds,
        }
        if bias:
            tensors["bias"] = draw.normal(channels)
        return tensors

    grads = ("x",) if frozen else ("x", "weight", "bias") if bias else ("x", "weight")
    return Case(label, inputs, grads, options, large)


CAUSAL_CONV = tried(
    "causal_conv",
    cases=(
        conv_case("shorter than its reach", (1, 2, 3, 4, 5), 40),
        conv_case("edges of tiles", (15, 1, 16, 17), 33, bias=True),
        conv_case("no activation", (70,), 64, bias=True, activation=None),
        conv_case("an empty document", (9, 0, 12), 16),
        conv_case("no token", (0,), 16),
        conv_case("two taps", (30,), 48, taps=2),
        conv_case("frozen weight", (20, 5), 16, frozen=True),
        conv_case("sliced", (33,), 24, sliced=True),
        conv_case("qwen3.5", (4096, 1, 63, 65, 3967), 8192, large=True),
    ),
    tiny=conv_case("tiny", (2, 5), 3, bias=True),
    one_graph=False,
)
