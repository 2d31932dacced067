"""The calls that ``trainkit bench ops`` times: shapes, inputs, floors, each provider's function.

M tokens, H hidden, F feed-forward, V vocabulary. A floor is the bytes a perfect kernel moves: each
input read once, each output written once.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainkit.kernels.ops import OPS

TOKENS = 16384
LOSS_TOKENS = 8192
HOST_TOKENS = 64
"""So few that the GPU is done before the host is."""

VOCABULARY = 151936
SEQUENCE = 2048
HIDDEN = (896, 2048, 3584, 4096, 8192)
HEADS = ((14, 2, 64), (28, 4, 128), (32, 8, 128))
FEED_FORWARD = (4864, 14336, 18944)
PROVIDERS = ("trainkit", "eager", "torch_compile", "liger", "quack")


@dataclass(frozen=True)
class OpCell:
    """An op at one size.

    Args:
        op: the name in the registry.
        case: the size, as it is printed.
        inputs: makes the tensors, by parameter name.
        grads: the parameters that get gradients.
        forward_bytes: floor of the forward pass.
        backward_bytes: floor of the backward pass.
    """

    op: str
    case: str
    inputs: Callable[[], dict[str, Tensor]]
    grads: tuple[str, ...]
    forward_bytes: int
    backward_bytes: int


def normal(*shape: int) -> Tensor:
    """Random bf16 numbers on the GPU: constant data would flatter the clocks."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def cells(tokens: int = TOKENS) -> Iterator[OpCell]:
    """Every op at every size of the table, on this many rows (the loss on at most half)."""
    for hidden in HIDDEN:
        yield _norm_cell("rms_norm", tokens, hidden)
    for hidden in HIDDEN:
        yield _norm_cell("add_rms_norm", tokens, hidden)
    for q_heads, k_heads, head_dim in HEADS:
        yield _rope_cell(tokens, q_heads, k_heads, head_dim)
    for op in ("swiglu", "swiglu_packed"):
        for width in FEED_FORWARD:
            yield _gated_cell(op, tokens, width)
    yield _loss_cell(min(tokens, LOSS_TOKENS))


def _norm_cell(op: str, tokens: int, hidden: int) -> OpCell:
    add = op == "add_rms_norm"

    def inputs() -> dict[str, Tensor]:
        rows = {name: normal(tokens, hidden) for name in (("x", "residual") if add else ("x",))}
        return {**rows, "weight": normal(hidden)}

    unit = 2 * tokens * hidden
    names = ("x", "residual", "weight") if add else ("x", "weight")
    return OpCell(
        op, f"H={hidden}", inputs, names, (4 if add else 2) * unit, (4 if add else 3) * unit
    )


def _rope_cell(tokens: int, q_heads: int, k_heads: int, head_dim: int) -> OpCell:
    length = min(SEQUENCE, tokens)
    batch = tokens // length

    def inputs() -> dict[str, Tensor]:
        angles = torch.randn(1, length, head_dim // 2, device="cuda")
        angles = torch.cat((angles, angles), dim=-1)
        return {
            "q": normal(batch, length, q_heads, head_dim).transpose(1, 2),
            "k": normal(batch, length, k_heads, head_dim).transpose(1, 2),
            "cos": angles.cos().bfloat16(),
            "sin": angles.sin().bfloat16(),
        }

    moved = 4 * tokens * (q_heads + k_heads) * head_dim
    return OpCell("apply_rope", f"{q_heads}/{k_heads}x{head_dim}", inputs, ("q", "k"), moved, moved)


def _gated_cell(op: str, tokens: int, width: int) -> OpCell:
    def inputs() -> dict[str, Tensor]:
        if op == "swiglu_packed":
            return {"gate_up": normal(tokens, 2 * width)}
        return {"gate": normal(tokens, width), "up": normal(tokens, width)}

    unit = 2 * tokens * width
    names = ("gate_up",) if op == "swiglu_packed" else ("gate", "up")
    return OpCell(op, f"F={width}", inputs, names, 3 * unit, 5 * unit)


def _loss_cell(tokens: int) -> OpCell:
    def inputs() -> dict[str, Tensor]:
        labels = torch.randint(VOCABULARY, (tokens,), device="cuda")
        return {"logits": normal(tokens, VOCABULARY), "labels": labels}

    unit = 2 * tokens * VOCABULARY
    # One read and one write make both; the passes are timed together.
    return OpCell("cross_entropy", f"V={VOCABULARY}", inputs, ("logits",), 2 * unit, 0)


def function_of(provider: str, op: str) -> Callable[..., Any] | None:
    """A provider's function with the op's parameters; None where it has none.

    Raises:
        ImportError: the provider is not installed.
    """
    if provider == "trainkit":
        return OPS[op].function
    if provider == "eager":
        return _eager_loss if op == "cross_entropy" else OPS[op].reference
    if provider == "torch_compile":
        from torch._functorch import config

        config.donated_buffer = False  # a graph is differentiated many times here
        eager = function_of("eager", op)
        return torch.compile(eager, dynamic=False) if eager is not None else None
    if provider == "liger":
        return _liger(op)
    if provider == "quack":
        return _quack(op)
    raise ValueError(f"no provider {provider!r}; there are {', '.join(PROVIDERS)}")


def _eager_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.float(), labels)


def _liger(op: str) -> Callable[..., Any] | None:
    if op == "rms_norm":
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        return lambda x, weight: LigerRMSNormFunction.apply(x, weight, 1e-6, 0.0, "llama", True)
    if op == "add_rms_norm":
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction as Fused

        return lambda x, residual, weight: Fused.apply(
            x, residual, weight, 1e-6, 0.0, "llama", True
        )
    if op == "apply_rope":
        from liger_kernel.ops.rope import LigerRopeFunction

        return LigerRopeFunction.apply
    if op in ("swiglu", "swiglu_packed"):
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        if op == "swiglu":
            return LigerSiLUMulFunction.apply
        return lambda gate_up: LigerSiLUMulFunction.apply(*gate_up.chunk(2, dim=-1))
    if op == "cross_entropy":
        from liger_kernel.transformers.functional import liger_cross_entropy

        # It overwrites the logits; a caller who needs them again must copy them.
        return lambda logits, labels: liger_cross_entropy(logits.clone(), labels)
    return None


def _quack(op: str) -> Callable[..., Any] | None:
    if op == "rms_norm":
        from quack.rmsnorm import rmsnorm

        return functools.partial(rmsnorm, eps=1e-6)
    if op == "add_rms_norm":
        from quack.rmsnorm import rmsnorm

        return lambda x, residual, weight: rmsnorm(
            x, weight, residual=residual, eps=1e-6, prenorm=True
        )
    if op == "cross_entropy":
        from quack.cross_entropy import cross_entropy

        return lambda logits, labels: cross_entropy(logits, labels, reduction="mean")
    return None
