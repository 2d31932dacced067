"""The contract of gated_delta_rule."""

from typing import Any

import torch
from op_cases.op import Case, tried
from torch import Tensor
from torch.nn import functional as F

from trainkit.kernels.contract import Draw


def delta_case(
    label: str,
    lengths: tuple[int, ...],
    heads: tuple[int, int],
    sizes: tuple[int, int],
    *,
    decay: float = 1.0,
    repeated: bool = False,
    sliced: bool = False,
    large: bool = False,
    **options: Any,
) -> Case:
    """A call on documents of these lengths.

    Args:
        label: what is special.
        lengths: of the documents.
        heads: of keys, of values.
        sizes: of a key, of a value.
        decay: what the usual decay is multiplied by.
        repeated: all keys of a document are one, as of a token that is repeated.
        sliced: q, k and v lie side by side, as from one projection.
        large: too slow for the interpreter.
        options: of the op.
    """

    def inputs(draw: Draw) -> dict[str, Tensor]:
        tokens, (hk, hv), (k, v) = sum(lengths), heads, sizes
        scale = 1.0 if options.get("normalize", True) else 0.2
        if sliced:
            row = draw.normal(tokens, 2 * hk * k + hv * v, scale=scale)
            q, key, value = row.split([hk * k, hk * k, hv * v], -1)
            q, key, value = q.view(-1, hk, k), key.view(-1, hk, k), value.view(-1, hv, v)
        else:
            q = draw.normal(tokens, hk, k, scale=scale)
            key = draw.normal(tokens, hk, k, scale=scale)
            value = draw.normal(tokens, hv, v)
        if repeated:
            key = key[:1].expand(tokens, -1, -1)
        wide = torch.promote_types(draw.dtype, torch.float32)
        rate = draw.normal(hv).to(wide).exp()
        return {
            "q": q,
            "k": key,
            "v": value,
            "g": -decay * rate * F.softplus(draw.normal(tokens, hv).to(wide) - 3.0),
            "beta": draw.normal(tokens, hv).to(wide).sigmoid(),
            "cu_seqlens": torch.tensor([0, *lengths], device=draw.device).cumsum(0).int(),
        }

    return Case(label, inputs, ("q", "k", "v", "g", "beta"), options, large)


GATED_DELTA_RULE = tried(
    "gated_delta_rule",
    cases=(
        delta_case("short documents", (1, 0, 3), (1, 2), (16, 16)),
        delta_case("edges of chunks", (63, 1, 65), (1, 1), (32, 16)),
        delta_case("a fresh layer's decay", (130,), (1, 2), (24, 40), decay=200.0),
        delta_case("one key, again and again", (66,), (1, 2), (16, 16), repeated=True, decay=0.01),
        delta_case("no token", (0,), (1, 2), (16, 16)),
        delta_case("as they are", (30,), (2, 2), (16, 16), sliced=True, normalize=False, scale=0.1),
        delta_case("qwen3.5", (1000, 1, 63, 984), (16, 32), (128, 128), large=True),
        delta_case("heads of 64", (200, 1, 63, 500), (4, 4), (64, 64), large=True),
        delta_case("olmo hybrid", (700, 68), (6, 6), (96, 192), large=True),
    ),
    tiny=delta_case("tiny", (3, 2), (1, 2), (4, 3)),
    one_graph=False,
)
