"""Kernels of the gated activations. M rows, F columns.

Bytes a perfect kernel moves, in elements: forward 3MF, backward 5MF. Contiguous operands are one
long row, so no lane idles at the end of a row. The packed variants read both halves of a (M, 2F)
projection where they are and write one (M, 2F) gradient: no chunk copies, no concatenation.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from trainkit.kernels.launch import INTERPRETING, Kernel, as_rows, empty_like

# What was read stays in the cache in place of what was written: 1% faster, measured.
KEEP = tl.constexpr("evict_last")

_PLAIN: tl.constexpr = tl.constexpr(INTERPRETING)
"""The interpreter knows no machine instructions."""


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _quick_sigmoid(x):
    """To about two roundings of fp32, in four instructions; underflow and overflow end in 0 or 1.

    Triton's exponential and quotient take care of subnormal numbers, with three times as many.
    """
    if _PLAIN:
        return _sigmoid(x)
    power = tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;",
        "=f,f",
        [x * -1.4426950408889634],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + power], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _gelu_argument(gate):
    # gelu_tanh(x) = x/2 (1 + tanh z) = x sigmoid(2z), z = sqrt(2/pi) (x + 0.044715 x^3)
    return 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)


@triton.jit
def _activation(gate, TANH_GELU: tl.constexpr):
    return gate * _sigmoid(_gelu_argument(gate) if TANH_GELU else gate)


@triton.jit
def _activation_and_slope(gate, TANH_GELU: tl.constexpr):
    if TANH_GELU:
        s = _sigmoid(_gelu_argument(gate))
        inner = 1.5957691216057308 * (1.0 + 3.0 * 0.044715 * gate * gate)
        slope = s * (1.0 + gate * (1.0 - s) * inner)
    else:
        s = _sigmoid(gate)
        slope = s * (1.0 + gate * (1.0 - s))
    return gate * s, slope


@triton.jit
def _place(num_cols, num_blocks, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    row = program // num_blocks
    cols = (program % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    return row, cols, cols < num_cols


@triton.jit
def _gated(gate, up, dtype: tl.constexpr, WIDE: tl.constexpr, TANH_GELU: tl.constexpr):
    # Hugging Face rounds the activation to the module's dtype before the product.
    activated = _activation(gate.to(WIDE), TANH_GELU).to(dtype).to(WIDE)
    return (activated * up.to(WIDE)).to(dtype)


@triton.jit
def _gated_backward(gate, up, dy, WIDE: tl.constexpr, TANH_GELU: tl.constexpr):
    activated, slope = _activation_and_slope(gate.to(WIDE), TANH_GELU)
    dy = dy.to(WIDE)
    return dy * up.to(WIDE) * slope, dy * activated


@triton.jit(do_not_specialize=["num_blocks"])
def _forward(
    gate_ptr,
    up_ptr,
    out_ptr,
    gate_stride,
    up_stride,
    num_cols,
    num_blocks,
    TANH_GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    WIDE: tl.constexpr = tl.float64 if gate_ptr.dtype.element_ty == tl.float64 else tl.float32
    row, cols, mask = _place(num_cols, num_blocks, BLOCK)
    gate = tl.load(gate_ptr + row * gate_stride + cols, mask=mask, other=0.0, eviction_policy=KEEP)
    up = tl.load(up_ptr + row * up_stride + cols, mask=mask, other=0.0, eviction_policy=KEEP)
    out = _gated(gate, up, out_ptr.dtype.element_ty, WIDE, TANH_GELU)
    tl.store(out_ptr + row * num_cols + cols, out, mask=mask)


@triton.jit(do_not_specialize=["num_blocks"])
def _backward(
    gate_ptr,
    up_ptr,
    dy_ptr,
    dgate_ptr,
    dup_ptr,
    gate_stride,
    up_stride,
    dy_stride,
    num_cols,
    num_blocks,
    TANH_GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    WIDE: tl.constexpr = tl.float64 if gate_ptr.dtype.element_ty == tl.float64 else tl.float32
    row, cols, mask = _place(num_cols, num_blocks, BLOCK)
    gate = tl.load(gate_ptr + row * gate_stride + cols, mask=mask, other=0.0)
    up = tl.load(up_ptr + row * up_stride + cols, mask=mask, other=0.0)
    dy = tl.load(dy_ptr + row * dy_stride + cols, mask=mask, other=0.0)
    dgate, dup = _gated_backward(gate, up, dy, WIDE, TANH_GELU)
    tl.store(dgate_ptr + row * num_cols + cols, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
    tl.store(dup_ptr + row * num_cols + cols, dup.to(dup_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_blocks"])
def _packed_forward(
    packed_ptr,
    out_ptr,
    packed_stride,
    num_blocks,
    UP_FIRST: tl.constexpr,
    F: tl.constexpr,
    BLOCK: tl.constexpr,
):
    WIDE: tl.constexpr = tl.float64 if packed_ptr.dtype.element_ty == tl.float64 else tl.float32
    row, cols, mask = _place(F, num_blocks, BLOCK)
    packed = packed_ptr + row * packed_stride + cols
    gate = tl.load(packed + (F if UP_FIRST else 0), mask=mask, other=0.0, eviction_policy=KEEP)
    up = tl.load(packed + (0 if UP_FIRST else F), mask=mask, other=0.0, eviction_policy=KEEP)
    out = _gated(gate, up, out_ptr.dtype.element_ty, WIDE, False)
    tl.store(out_ptr + row * F + cols, out, mask=mask)


@triton.jit(do_not_specialize=["num_blocks"])
def _packed_backward(
    packed_ptr,
    dy_ptr,
    dpacked_ptr,
    packed_stride,
    dy_stride,
    num_blocks,
    UP_FIRST: tl.constexpr,
    F: tl.constexpr,
    BLOCK: tl.constexpr,
):
    WIDE: tl.constexpr = tl.float64 if packed_ptr.dtype.element_ty == tl.float64 else tl.float32
    row, cols, mask = _place(F, num_blocks, BLOCK)
    packed = packed_ptr + row * packed_stride + cols
    gate = tl.load(packed + (F if UP_FIRST else 0), mask=mask, other=0.0)
    up = tl.load(packed + (0 if UP_FIRST else F), mask=mask, other=0.0)
    dy = tl.load(dy_ptr + row * dy_stride + cols, mask=mask, other=0.0)
    dgate, dup = _gated_backward(gate, up, dy, WIDE, False)
    dpacked = dpacked_ptr + row * (2 * F) + cols
    dtype: tl.constexpr = dpacked_ptr.dtype.element_ty
    tl.store(dpacked + (F if UP_FIRST else 0), dgate.to(dtype), mask=mask)
    tl.store(dpacked + (0 if UP_FIRST else F), dup.to(dtype), mask=mask)


FORWARD = Kernel(_forward)
BACKWARD = Kernel(_backward)
PACKED_FORWARD = Kernel(_packed_forward)
PACKED_BACKWARD = Kernel(_packed_backward)

BLOCK, WARPS = (2**16, 4) if INTERPRETING else (2048, 8)


def launch_forward(gate: Tensor, up: Tensor, tanh_gelu: bool) -> Tensor:
    """The gated product of two tensors of one shape, any strides; the result is contiguous."""
    out = empty_like(gate)
    if out.numel():
        rows, cols, (gate, up) = _line_up(gate, up)
        blocks = -(-cols // BLOCK)
        FORWARD.launch(
            rows * blocks,
            (gate, up, out),
            (gate.stride(0), up.stride(0), cols),
            (blocks,),
            (tanh_gelu, BLOCK),
            WARPS,
        )
    return out


def launch_backward(gate: Tensor, up: Tensor, dy: Tensor, tanh_gelu: bool) -> tuple[Tensor, Tensor]:
    """(dgate, dup), both contiguous."""
    dgate, dup = empty_like(gate), empty_like(up)
    if dgate.numel():
        rows, cols, (gate, up, dy) = _line_up(gate, up, dy)
        blocks = -(-cols // BLOCK)
        BACKWARD.launch(
            rows * blocks,
            (gate, up, dy, dgate, dup),
            (gate.stride(0), up.stride(0), dy.stride(0), cols),
            (blocks,),
            (tanh_gelu, BLOCK),
            WARPS,
        )
    return dgate, dup


def launch_packed_forward(packed: Tensor, up_first: bool) -> Tensor:
    """The gated product of the halves of packed (M, 2F): (M, F)."""
    rows, width = packed.shape
    cols = width // 2
    out = packed.new_empty((rows, cols))
    if out.numel():
        blocks = -(-cols // BLOCK)
        PACKED_FORWARD.launch(
            rows * blocks,
            (packed, out),
            (packed.stride(0),),
            (blocks,),
            (up_first, cols, BLOCK),
            WARPS,
        )
    return out


def launch_packed_backward(packed: Tensor, dy: Tensor, up_first: bool) -> Tensor:
    """The gradient of packed (M, 2F), from dy (M, F), in one tensor."""
    rows, cols = dy.shape
    dpacked = packed.new_empty((rows, 2 * cols))
    if dpacked.numel():
        blocks = -(-cols // BLOCK)
        PACKED_BACKWARD.launch(
            rows * blocks,
            (packed, dy, dpacked),
            (packed.stride(0), dy.stride(0)),
            (blocks,),
            (up_first, cols, BLOCK),
            WARPS,
        )
    return dpacked


def _line_up(*tensors: Tensor) -> tuple[int, int, Sequence[Tensor]]:
    """(rows, columns, tensors): one long row when all are contiguous, else dense-column rows.

    The row stride of the one long row is never used, so the tensors need no view for it.
    """
    if all(tensor.is_contiguous() and tensor.dim() for tensor in tensors):
        return 1, tensors[0].numel(), tensors
    rows = [as_rows(tensor) for tensor in tensors]
    return rows[0].shape[0], rows[0].shape[1], rows
