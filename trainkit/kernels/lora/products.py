"""Products with a skinny result, and where they run.

A skinny product has the adapter's rank on one side: (M, K) by (K, R), or (N, M) by (M, R). Matrix
libraries size their tiles for square work and leave most of a GPU idle on these; ours stream the
wide operand once. Wide ranks, fp64 and CPU tensors go to torch.

M tokens, K inputs, N outputs, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainkit.kernels.launch import (
    HAS_TRITON,
    INTERPRETING,
    is_on_gpu,
    next_power_of_2,
    num_multiprocessors,
    runs_kernel,
    shared_bytes,
)

if HAS_TRITON:
    from trainkit.kernels.lora import kernel

MAX_RANK = 128
"""The widest stack of adapters that the kernels take."""

_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_PROGRAMS_PER_MULTIPROCESSOR = 3


def takes_kernel(lora_rank: int, dtype: torch.dtype, *tensors: Tensor) -> bool:
    """Whether the kernels serve these operands at this rank, in this dtype."""
    return lora_rank <= MAX_RANK and dtype in _KERNEL_DTYPES and runs_kernel(*tensors)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums over tokens are kept in: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def pad_rank(lora_rank: int) -> int:
    """The rank as a tile dimension: a power of two that tensor cores accept."""
    return max(16, next_power_of_2(lora_rank))


def precision(dtype: torch.dtype) -> str:
    """How fp32 operands are multiplied: as TF32 where torch is allowed to, else exactly."""
    if dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32:
        return "ieee"
    return "tf32"


def rows(x: Tensor, w: Tensor, out: Tensor | None = None) -> Tensor:
    """``x w^T``: (M, K) by (R, K) to (M, R), in x's dtype."""
    if out is None:
        out = x.new_empty((x.shape[0], w.shape[0]))
    if takes_kernel(w.shape[0], x.dtype, x, w):
        _launch_rows(x, w, out, batch=1, batch_strides=(0, 0, 0))
        return out
    return torch.mm(x, w.t(), out=out)


def rows_pair(pair: Tensor, w_pair: Tensor, out: Tensor) -> Tensor:
    """Two products in one launch: out[:, i] = pair[i] w_pair[i]^T.

    Args:
        pair: (2, M, K), unit stride on the last axis.
        w_pair: (2, R, K); the stride of R or of K is 1.
        out: (M, 2R) contiguous.
    """
    lora_rank = w_pair.shape[1]
    if takes_kernel(lora_rank, pair.dtype, pair, w_pair):
        strides = (pair.stride(0), w_pair.stride(0), lora_rank)
        _launch_rows(pair[0], w_pair[0], out, batch=2, batch_strides=strides)
        return out
    for index in range(2):
        place = out[:, index * lora_rank : (index + 1) * lora_rank]
        torch.mm(pair[index], w_pair[index].t(), out=place)
    return out


def columns(
    y: Tensor, p: Tensor, dtype: torch.dtype, *, scale: float = 1.0, transposed: bool = False
) -> Tensor:
    """``scale y^T p``: (M, N) by (M, R) to (N, R), summed in fp32; (R, N) when transposed."""
    lora_rank = p.shape[1]
    if takes_kernel(lora_rank, y.dtype, y, p):
        return _launch_columns(y, p, scale, transposed).to(dtype)
    left, right = (p.t(), y) if transposed else (y.t(), p)
    if is_on_gpu(y) and y.dtype in (torch.bfloat16, torch.float16) and dtype == torch.float32:
        product = torch.mm(left, right, out_dtype=torch.float32)
    else:
        product = torch.mm(left, right)
    return (product * scale if scale != 1.0 else product).to(dtype)


def add_product(out: Tensor, p: Tensor, a: Tensor) -> Tensor:
    """``out += p a``, in place: (M, N) plus (M, R) by (R, N).

    For a product that could not add by itself. Elsewhere let the matrix library add, which costs
    one read less.
    """
    lora_rank = p.shape[1]
    if not takes_kernel(lora_rank, out.dtype, out, p, a) or not out.numel():
        return out.addmm_(p, a)
    block_m, block_n = (128, 512) if INTERPRETING else (64, 128)
    num_rows, num_cols = out.shape
    turned, a_stride = _lies(a)
    kernel.ADD_PRODUCT.launch(
        -(-num_rows // block_m) * -(-num_cols // block_n),
        (p, a, out),
        (p.stride(0), a_stride, out.stride(0), num_cols),
        (num_rows,),
        (turned, lora_rank, pad_rank(lora_rank), precision(out.dtype), block_m, block_n),
        4,
    )
    return out


def _launch_rows(
    x: Tensor, w: Tensor, out: Tensor, *, batch: int, batch_strides: tuple[int, int, int]
) -> None:
    num_rows, num_inner = x.shape
    if num_rows == 0:
        return
    lora_rank = w.shape[0]
    padded = pad_rank(lora_rank)
    block_m = 64 if padded <= 64 else 128
    block_k, stages = 128 if x.element_size() == 2 else 64, 4 if padded <= 64 else 3
    tiles = (block_m + padded) * block_k * x.element_size()
    if (stages - 1) * tiles > shared_bytes(x):  # a consumer's GPU, at ranks above 64
        block_k //= 2
    if INTERPRETING:
        block_m, block_k = 128, 512
    turned, w_stride = _lies(w)
    kernel.ROWS.launch(
        -(-num_rows // block_m) * batch,
        (x, w, out),
        (
            *(batch_strides[0], x.stride(0)),
            *(batch_strides[1], w_stride),
            *(batch_strides[2], out.stride(0)),
            num_inner,
        ),
        (num_rows,),
        (
            *(turned, lora_rank, padded, precision(x.dtype)),
            *(block_m, block_k, stages),
        ),
        4 if block_m == 64 else 8,
        3,
    )


def _lies(a: Tensor) -> tuple[bool, int]:
    """(whether a matrix (R, N) lies as (N, R), the stride that is not 1)."""
    if a.stride(1) == 1:
        return False, a.stride(0)
    return True, a.stride(1)


def split_rows(num_rows: int, num_blocks: int, block: int, like: Tensor) -> tuple[int, int]:
    """(splits, rows a split) that fill the GPU, each split a whole number of blocks.

    The number depends on shapes and the GPU only, so the order of sums never changes.
    """
    wanted = -(-_PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(like) // max(num_blocks, 1))
    most = max(1, num_rows // (4 * block))  # a split shorter than four blocks only adds sums
    splits = max(1, min(wanted, most, 64))
    per_split = max(1, math.ceil(math.ceil(num_rows / splits) / block)) * block
    return max(1, math.ceil(num_rows / per_split)), per_split


def total(parts: Tensor) -> Tensor:
    return parts[0] if parts.shape[0] == 1 else parts.sum(0)


def _launch_columns(y: Tensor, p: Tensor, scale: float, transposed: bool) -> Tensor:
    num_rows, num_cols = y.shape
    lora_rank = p.shape[1]
    padded = pad_rank(lora_rank)
    block_n, block_m = (128, 64) if y.element_size() == 2 else (64, 32)
    if INTERPRETING:
        block_n, block_m = 256, 128
    num_blocks = -(-num_cols // block_n)
    splits, per_split = split_rows(num_rows, num_blocks, block_m, y)
    shape = (splits, lora_rank, num_cols) if transposed else (splits, num_cols, lora_rank)
    parts = torch.empty(shape, device=y.device, dtype=torch.float32)
    if num_cols:
        kernel.COLUMNS.launch(
            num_blocks * splits,
            (y, p, parts),
            (y.stride(0), p.stride(0), num_cols),
            (num_rows, per_split, float(scale)),
            (
                *(transposed, lora_rank, padded, precision(y.dtype)),
                *(block_n, block_m, 4 if padded <= 64 else 2),
            ),
            4,
            3,
        )
    return total(parts)


def cast_factors(
    stacked: Sequence[Tensor], scaled: Sequence[tuple[Tensor, float]], dtype: torch.dtype
) -> tuple[Tensor | None, list[Tensor]]:
    """Adapter factors as the products need them.

    Returns:
        The first ones below each other (sum of R_i, K), None if there is none; the others times
        their factor. What need not change may be the parameter's own memory.
    """
    tensors = [*stacked, *(tensor for tensor, _ in scaled)]
    changes = any(tensor.dtype != dtype for tensor in tensors)
    if changes and takes_kernel(0, dtype, *tensors) and all(t.is_contiguous() for t in tensors):
        return _launch_casts(stacked, scaled, dtype)
    stack = None
    if stacked:
        parts = [factor.detach().to(dtype) for factor in stacked]
        stack = parts[0] if len(parts) == 1 else torch.cat(parts)
    return stack, [
        tensor.detach().to(dtype) if factor == 1.0 else (tensor.detach() * factor).to(dtype)
        for tensor, factor in scaled
    ]


_CASTS_A_LAUNCH = 4
_ALIGNED = 64
"""Elements; every factor begins on a boundary that suits the widest loads."""


def _launch_casts(
    stacked: Sequence[Tensor], scaled: Sequence[tuple[Tensor, float]], dtype: torch.dtype
) -> tuple[Tensor | None, list[Tensor]]:
    """All of them into one buffer: a launch for four, where torch takes one or two for each."""
    items = [*((tensor, 1.0) for tensor in stacked), *scaled]
    starts, end = [], 0
    for index, (tensor, _) in enumerate(items):
        if index >= len(stacked):
            end = -(-end // _ALIGNED) * _ALIGNED
        starts.append(end)
        end += tensor.numel()
    buffer = items[0][0].new_empty(end, dtype=dtype)
    for first in range(0, len(items), _CASTS_A_LAUNCH):
        group = items[first : first + _CASTS_A_LAUNCH]
        padded = group + [group[0]] * (_CASTS_A_LAUNCH - len(group))
        places = [start - starts[first] for start in starts[first : first + len(group)]]
        places += [0] * (_CASTS_A_LAUNCH - len(group))
        block = 2**16 if INTERPRETING else 1024
        largest = max(tensor.numel() for tensor, _ in group)
        if largest:
            blocks = -(-largest // block)
            kernel.CAST.launch(
                blocks * len(group),
                (*(tensor.detach() for tensor, _ in padded), buffer[starts[first] :]),
                (*(tensor.numel() for tensor, _ in padded), *places[1:]),
                (blocks, *(float(factor) for _, factor in padded)),
                (block,),
                4,
                3,
            )
    views = [
        buffer[start : start + tensor.numel()].view(tensor.shape)
        for start, (tensor, _) in zip(starts, items, strict=True)
    ]
    stack = None
    if stacked:
        height = sum(tensor.shape[0] for tensor in stacked)
        stack = buffer[: height * stacked[0].shape[1]].view(height, stacked[0].shape[1])
    return stack, views[len(stacked) :]


def reshaped(out: Tensor, shape: Sequence[int]) -> Tensor:
    """As ``view``, for what an autograd function gives back: a view could not be added to in place.

    Llama 4 adds its experts to what its shared expert gives.
    """
    made: Tensor = torch.ops.aten._unsafe_view.default(out, shape)
    return made


# -- What a fused function needs to know about one adapted linear layer ---------------------------
# Shapes: K inputs, N outputs, R rank.


Unpack = Callable[[Tensor, torch.dtype], Tensor]


@dataclass(frozen=True)
class Projection:
    """A frozen linear layer and its adapter, read from their modules at call time.

    Attributes:
        weight: (N, K), or the storage of a packed weight that ``unpack`` understands. Frozen.
        bias: (N,), frozen, or None.
        lora_a: (R, K), or None for a layer without an adapter.
        lora_b: (N, R), present when ``lora_a`` is.
        scaling: factor of the adapter's output.
        unpack: turns packed storage into (N, K) of a dtype; called once per use of the weight, in
            the forward and in the backward pass.
    """

    weight: Tensor
    bias: Tensor | None = None
    lora_a: Tensor | None = None
    lora_b: Tensor | None = None
    scaling: float = 1.0
    unpack: Unpack | None = None

    @property
    def lora_rank(self) -> int:
        """R; 0 without an adapter."""
        return 0 if self.lora_a is None else self.lora_a.shape[0]

    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """What autograd must see: weight, bias, A, B."""
        return self.weight, self.bias, self.lora_a, self.lora_b

    def read(self, dtype: torch.dtype) -> Tensor:
        """The weight (N, K) in a dtype; no copy when it has it already."""
        return read_weight(self.weight, self.unpack, dtype)


def read_weight(weight: Tensor, unpack: Unpack | None, dtype: torch.dtype) -> Tensor:
    """A weight (N, K) in a dtype: unpacked straight into it, or cast when it differs."""
    if unpack is not None:
        return unpack(weight, dtype)
    return weight.to(dtype)
