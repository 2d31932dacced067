"""The contract of cross_entropy."""

from typing import Any

import torch
from op_cases.op import Case, tried
from torch import Tensor

from trainkit.kernels.contract import Draw


def cross_entropy_case(
    label: str,
    shape: tuple[int, ...],
    *,
    scale: float = 3.0,
    sure: float = 0.0,
    ignored: float = 0.3,
    layout: str = "dense",
    num_items: str | int | None = None,
    large: bool = False,
    **options: Any,
) -> Case:
    *rows, vocab = shape

    def inputs(draw: Draw) -> dict[str, Tensor]:
        labels = draw.integers(vocab, *rows)
        if layout == "expanded":
            logits = draw.normal(*[1] * len(rows), vocab, scale=scale).expand(shape)
        elif layout == "columns first":
            logits = draw.normal(vocab, *rows, scale=scale).movedim(0, -1)
        elif layout == "sliced":
            logits = draw.normal(*rows, vocab + 24, scale=scale)[..., :vocab]
        else:
            logits = draw.normal(*shape, scale=scale)
        if sure and labels.numel():
            bonus = torch.full_like(labels.unsqueeze(-1), sure, dtype=draw.dtype)
            logits = logits.scatter_add(-1, labels.unsqueeze(-1), bonus)
        skipped = torch.arange(labels.numel(), device=labels.device) < ignored * labels.numel()
        tensors = {"logits": logits, "labels": labels.masked_fill(skipped.view(rows), -100)}
        if num_items == "tensor":
            tensors["num_items"] = torch.tensor(5, device=labels.device)
        return tensors

    if isinstance(num_items, int):
        options["num_items"] = num_items
    return Case(label, inputs, ("logits",), options, large)


CROSS_ENTROPY = tried(
    "cross_entropy",
    cases=(
        cross_entropy_case("odd", (2, 5, 123)),
        cross_entropy_case("streamed", (4, 15165)),
        cross_entropy_case("qwen2", (2, 151936)),
        cross_entropy_case("resized vocabulary", (2, 151655), ignored=0.0),
        cross_entropy_case("one row", (1, 1000), ignored=0.0),
        cross_entropy_case("one class", (4, 1)),
        cross_entropy_case("no rows", (0, 123)),
        cross_entropy_case("nothing trained", (5, 123), ignored=1.0),
        cross_entropy_case("nothing trained, given", (5, 123), ignored=1.0, num_items="tensor"),
        cross_entropy_case("sliced", (6, 200), layout="sliced"),
        cross_entropy_case("columns first", (6, 200), layout="columns first"),
        cross_entropy_case("expanded", (6, 200), layout="expanded"),
        cross_entropy_case("num_items", (6, 123), num_items=17),
        cross_entropy_case("num_items on the device", (6, 123), num_items="tensor"),
        cross_entropy_case("zero items", (6, 123), num_items=0),
        cross_entropy_case("smoothing", (6, 5000), label_smoothing=0.1),
        cross_entropy_case("softcap", (6, 5000), scale=20.0, softcap=30.0),
        cross_entropy_case("z loss", (6, 5000), z_loss=1e-3),
        cross_entropy_case(
            "all options", (6, 9000), label_smoothing=0.1, softcap=30.0, z_loss=1e-3, num_items=9
        ),
        cross_entropy_case("sure", (8, 1000), sure=30.0),
        cross_entropy_case("hopeless", (8, 1000), sure=-300.0),
        cross_entropy_case("large logits", (8, 1000), scale=2000.0),
        cross_entropy_case("llama 2", (515, 32000), large=True),
        cross_entropy_case("llama 3", (257, 128256), large=True),
        cross_entropy_case("qwen2, long", (1025, 151936), large=True),
        cross_entropy_case("resized, long", (129, 151655), large=True),
        cross_entropy_case("gemma 2", (129, 256000), scale=15.0, softcap=30.0, large=True),
    ),
    tiny=cross_entropy_case(
        "tiny", (3, 7), label_smoothing=0.1, softcap=5.0, z_loss=1e-2, num_items=3
    ),
)
