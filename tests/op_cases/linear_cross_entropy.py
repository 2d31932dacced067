"""The contract of linear_cross_entropy."""

from typing import Any

from op_cases.op import Case, tried
from torch import Tensor

from trainkit.kernels.contract import Draw


def linear_cross_entropy_case(
    label: str,
    rows: tuple[int, ...],
    hidden_size: int,
    vocab_size: int,
    *,
    ignored: float = 0.3,
    bias: bool = False,
    turned: bool = False,
    frozen: bool = False,
    large: bool = False,
    **options: Any,
) -> Case:
    """A call on hidden states (*rows, hidden_size)."""

    def inputs(draw: Draw) -> dict[str, Tensor]:
        labels = draw.integers(vocab_size, *rows)
        if turned:
            hidden = draw.normal(*reversed(rows), hidden_size).transpose(0, 1)
        else:
            hidden = draw.normal(*rows, hidden_size)
        skipped = draw.integers(1000, *rows) < 1000 * ignored
        tensors = {
            "hidden": hidden,
            "weight": draw.normal(vocab_size, hidden_size, scale=2.0 * hidden_size**-0.5),
            "labels": labels.masked_fill(skipped, -100),
        }
        if bias:
            tensors["bias"] = draw.normal(vocab_size)
        return tensors

    grads = (
        ("hidden",) if frozen else ("hidden", "weight", "bias") if bias else ("hidden", "weight")
    )
    return Case(label, inputs, grads, options, large)


LINEAR_CROSS_ENTROPY = tried(
    "linear_cross_entropy",
    # Sizes at which the roundings of thousands of numbers average out: eager rounds the logits'
    # gradient after the incoming gradient and 1 / num_items have entered, this op before.
    cases=(
        linear_cross_entropy_case("odd", (3, 11), 123, 1999),
        linear_cross_entropy_case("turned", (4, 8), 128, 2000, turned=True),
        linear_cross_entropy_case("bias", (32,), 128, 5003, bias=True),
        linear_cross_entropy_case("one row", (1,), 4096, 700, ignored=0.0),
        linear_cross_entropy_case("no rows", (0,), 8, 40),
        linear_cross_entropy_case("nothing trained", (5,), 8, 40, ignored=1.0),
        linear_cross_entropy_case("num_items", (32,), 128, 2000, num_items=17),
        linear_cross_entropy_case("zero items", (6,), 8, 40, num_items=0),
        linear_cross_entropy_case("softcap", (32,), 128, 2000, softcap=5.0),
        linear_cross_entropy_case(
            "all options",
            (32,),
            128,
            2000,
            label_smoothing=0.1,
            softcap=5.0,
            z_loss=1e-3,
            num_items=9,
        ),
        linear_cross_entropy_case("qwen2 0.5b", (3, 700), 896, 151936, large=True),
        linear_cross_entropy_case("resized vocabulary", (1030,), 256, 151655, large=True),
        linear_cross_entropy_case("llama 3.2 1b", (1500,), 2048, 128256, large=True),
    ),
    tiny=linear_cross_entropy_case(
        "tiny", (4,), 2, 5, bias=True, label_smoothing=0.1, softcap=5.0, z_loss=1e-2, num_items=3
    ),
    one_graph=False,
)

LINEAR_TOKEN_LOSSES = tried(
    "linear_token_losses",
    cases=(
        linear_cross_entropy_case("odd", (3, 11), 123, 1999),
        linear_cross_entropy_case("turned", (4, 8), 128, 2000, turned=True),
        linear_cross_entropy_case("bias", (32,), 128, 5003, bias=True),
        linear_cross_entropy_case("no rows", (0,), 8, 40),
        linear_cross_entropy_case("nothing trained", (5,), 8, 40, ignored=1.0),
        linear_cross_entropy_case("softcap", (32,), 128, 2000, softcap=5.0),
        linear_cross_entropy_case("frozen", (4, 11), 123, 1999, frozen=True),
        linear_cross_entropy_case("frozen, softcap", (32,), 128, 2000, frozen=True, softcap=5.0),
        linear_cross_entropy_case("frozen, no rows", (0,), 8, 40, frozen=True),
        linear_cross_entropy_case("frozen, untrained", (5,), 8, 40, frozen=True, ignored=1.0),
        linear_cross_entropy_case("qwen2 0.5b", (3, 700), 896, 151936, large=True),
        linear_cross_entropy_case("frozen, large", (3, 700), 896, 151936, frozen=True, large=True),
    ),
    tiny=linear_cross_entropy_case("tiny", (4,), 2, 5, bias=True, softcap=5.0),
    one_graph=False,
)


def linear_divergence_case(
    label: str,
    rows: tuple[int, ...],
    sizes: tuple[int, int],
    vocabs: tuple[int, int],
    *,
    ignored: float = 0.3,
    bias: bool = False,
    frozen: bool = False,
    large: bool = False,
    **options: Any,
) -> Case:
    """A student and a teacher of these widths and vocabularies."""

    def inputs(draw: Draw) -> dict[str, Tensor]:
        labels = draw.integers(vocabs[0], *rows)
        tensors = {"labels": labels.masked_fill(draw.integers(1000, *rows) < 1000 * ignored, -100)}
        for name, width, vocab in zip(("", "teacher_"), sizes, vocabs, strict=True):
            hidden, weight = f"{name}hidden", f"{name}weight"
            tensors[hidden] = draw.normal(*rows, width)
            tensors[weight] = draw.normal(vocab, width, scale=2.0 * width**-0.5)
            if bias:
                tensors[f"{name}bias"] = draw.normal(vocab)
        return tensors

    trained = ("hidden", "weight", "bias") if bias else ("hidden", "weight")
    return Case(label, inputs, ("hidden",) if frozen else trained, options, large)


_MIXED = {"kind": "jsd", "share": 0.3, "temperature": 2.0, "sft_weight": 0.25}
_CAPS = {"softcap": 5.0, "teacher_softcap": 7.0}

LINEAR_DIVERGENCE = tried(
    "linear_divergence",
    cases=(
        linear_divergence_case("odd", (3, 11), (123, 57), (1999, 1999)),
        linear_divergence_case("reverse", (33,), (128, 64), (2000, 2000), kind="reverse_kl"),
        linear_divergence_case("jsd", (150,), (128, 64), (2000, 2000), kind="jsd"),
        linear_divergence_case("wider", (33,), (128, 64), (2100, 2000), **_MIXED),
        linear_divergence_case("narrower", (33,), (128, 64), (2000, 2100), **_MIXED),
        linear_divergence_case("bias", (32,), (128, 64), (2003, 2003), bias=True, temperature=0.5),
        linear_divergence_case("caps", (32,), (128, 64), (2000, 2000), **_CAPS, **_MIXED),
        linear_divergence_case(
            "reverse, caps", (32,), (128, 64), (2000, 2000), kind="reverse_kl", **_CAPS
        ),
        linear_divergence_case("frozen", (4, 11), (123, 64), (1999, 1999), frozen=True),
        linear_divergence_case("no rows", (0,), (8, 8), (40, 40)),
        linear_divergence_case("nothing trained", (5,), (8, 8), (40, 40), ignored=1.0),
        linear_divergence_case("qwen2 0.5b", (3, 700), (896, 1536), (151936, 151936), large=True),
        linear_divergence_case(
            "padded vocabulary", (1030,), (256, 512), (151665, 152064), large=True, **_MIXED
        ),
    ),
    tiny=linear_divergence_case("tiny", (4,), (2, 3), (5, 4), bias=True, **_CAPS, **_MIXED),
    one_graph=False,
)
