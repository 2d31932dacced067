"""The contract of moe_mlp."""

from typing import Any

import torch
from op_cases.op import Case, tried
from torch import Tensor

from trainkit.kernels.contract import Draw
from trainkit.kernels.experts.function import Limits


def moe_case(
    label: str,
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    width: int,
    *,
    lora_rank: int = 0,
    chosen: tuple[int, ...] | None = None,
    nowhere: bool = False,
    trained: bool = False,
    biased: bool = False,
    whole: bool = False,
    large: bool = False,
    **options: Any,
) -> Case:
    """A call of moe_mlp.

    Args:
        label: what is special.
        tokens: T.
        top_k: K.
        experts: E.
        hidden: H.
        width: I.
        lora_rank: of adapters on both weights; 0 for none.
        chosen: the only experts that a token is sent to.
        nowhere: a third of the slots is sent to no expert.
        trained: the weights get gradients.
        biased: both products have one, of whole numbers.
        whole: the first product and its bias are whole numbers of some 7 at random: no rounding
            then takes one over the edge of a clamp between two of them.
        large: too slow for the interpreter.
        options: of the op.
    """
    transposed = options.get("transposed", False)

    def inputs(draw: Draw) -> dict[str, Tensor]:
        shapes = {"gate_up": (experts, 2 * width, hidden), "down": (experts, hidden, width)}
        tensors = {"x": draw.normal(tokens, hidden)}
        if whole:
            tensors["x"] = draw.integers(5, tokens, hidden).to(draw.dtype) - 2
        pool = torch.tensor(chosen or range(experts), device=draw.device)
        order = torch.rand(
            (tokens, len(pool)), generator=draw.generator, device=draw.device
        ).argsort(1)[:, :top_k]
        index = pool[order]
        if nowhere:
            index = torch.where(draw.integers(3, tokens, top_k) == 0, experts, index)
        tensors["index"] = index
        tensors["scale"] = draw.normal(tokens, top_k).abs()
        for name, (num, out, into) in shapes.items():
            size = (num, into, out) if transposed else (num, out, into)
            tensors[name] = draw.normal(*size, scale=into**-0.5)
            if whole and name == "gate_up":
                tensors[name] = draw.integers(3, *size).to(draw.dtype) - 1
            if biased:
                tensors[f"{name}_bias"] = draw.normal(num, out).round()
        if lora_rank:
            for name, (num, out, into) in shapes.items():
                tensors[f"{name}_a"] = draw.normal(num, lora_rank, into, scale=into**-0.5)
                # peft keeps B with the expert's number fastest
                b = draw.normal(out, lora_rank, num, scale=0.3)
                tensors[f"{name}_b"] = b.permute(2, 0, 1)
        return tensors

    grads = ["x", "scale"]
    grads += ["gate_up", "down"] if trained else []
    grads += ["gate_up_bias", "down_bias"] if trained and biased else []
    grads += (
        [f"{name}_{side}" for name in ("gate_up", "down") for side in "ab"] if lora_rank else []
    )
    return Case(label, inputs, tuple(grads), options, large)


_SMALL = (40, 2, 4, 32, 24)
_GPT_OSS: dict[str, Any] = {"interleaved": True, "transposed": True, "biased": True}

MOE_MLP = tried(
    "moe_mlp",
    cases=(
        moe_case("frozen", 20, 2, 4, 64, 32),
        moe_case("adapted", 150, 2, 4, 64, 32, lora_rank=8, scaling=(2.0, 0.5)),
        moe_case("trained", 20, 2, 4, 64, 32, trained=True),
        moe_case("transposed", 20, 2, 4, 64, 40, lora_rank=4, trained=True, transposed=True),
        moe_case("one expert has all", 150, 2, 3, 40, 24, chosen=(1, 2), lora_rank=16),
        moe_case("top 1", 33, 1, 5, 32, 16, lora_rank=16, activation="gelu_tanh"),
        moe_case("some go nowhere", 40, 3, 6, 32, 16, lora_rank=8, nowhere=True, trained=True),
        moe_case("no token", 0, 2, 4, 32, 16, lora_rank=8),
        moe_case("clamped", 40, 2, 4, 32, 16, limits=Limits(7.5), whole=True, trained=True),
        moe_case(
            "clamped, biased and interleaved",
            *_SMALL,
            limits=Limits(7.5, 1.702, 1.0),
            whole=True,
            trained=True,
            nowhere=True,
            **_GPT_OSS,
        ),
        moe_case(
            "biased with adapters",
            *_SMALL,
            limits=Limits(None, 1.702, 1.0),
            lora_rank=8,
            **_GPT_OSS,
        ),
        moe_case("qwen3-30b-a3b", 1024, 8, 128, 2048, 768, lora_rank=16, large=True),
        moe_case("olmoe", 2048, 8, 64, 2048, 1024, trained=True, large=True),
        moe_case(
            "gpt-oss",
            1024,
            4,
            32,
            2880,
            2880,
            limits=Limits(7.0, 1.702, 1.0),
            lora_rank=16,
            large=True,
            **_GPT_OSS,
        ),
    ),
    tiny=moe_case("tiny", 4, 2, 3, 8, 8, lora_rank=2, trained=True),
    one_graph=None,  # torch.compile passes it by
)
