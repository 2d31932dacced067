"""Quantising to e4m3, transposing codes, and the product of rows with a scale each.

None of these has a gradient: what is differentiated is the layer that uses them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainkit.kernels.fp8.reference import (
    FP8,
    SMALLEST_EXPONENT,
    fp8_gate_backward_reference,
    fp8_gate_reference,
    fp8_matmul_reference,
    fp8_quantize_both_reference,
    fp8_quantize_columns_reference,
    fp8_quantize_joint_reference,
    fp8_transpose_reference,
)
from trainkit.kernels.launch import (
    HAS_TRITON,
    as_rows,
    device_of,
    is_on_gpu,
    is_plain,
    remembered,
    runs_kernel,
)

if HAS_TRITON:
    from trainkit.kernels.fp8 import columns_kernel, gate_kernel, kernel, transpose_kernel

SMALLEST_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs with fp8 tensor cores."""

_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ALIGNMENT = 16
"""Columns of both operands of a product must be multiples of this many codes (bytes)."""


@remembered
def _capability(device_index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device_index)


def why_no_fp8(device: torch.device) -> str | None:
    """Why a device cannot multiply in fp8; None where it can, and on a CPU, which emulates it."""
    if device.type == "cpu":
        return None
    if device.type != "cuda" or torch.version.hip is not None:
        return f"fp8 products need an NVIDIA GPU, and this is {device.type}"
    index = torch.cuda.current_device() if device.index is None else device.index
    capability = _capability(index)
    if capability < SMALLEST_CAPABILITY:
        have, need = (".".join(map(str, each)) for each in (capability, SMALLEST_CAPABILITY))
        name = torch.cuda.get_device_name(index)
        return f"fp8 products need compute capability {need} (Ada, Hopper), and {name} has {have}"
    return None


def fits_fp8(num_outputs: int, num_inputs: int) -> bool:
    """Whether a weight's shape suits the tensor cores, forward and transposed."""
    return num_outputs % _ALIGNMENT == 0 and num_inputs % _ALIGNMENT == 0


def fp8_quantize(
    x: Tensor,
    factor: Tensor | None = None,
    *,
    keep_largest: bool = False,
    smallest: int = SMALLEST_EXPONENT,
) -> tuple[Tensor, Tensor]:
    """Rows in e4m3 with a scale each.

    Args:
        x: (M, K).
        factor: (K,) fp32 that multiplies the columns first.
        keep_largest: choose the scale so that a row's largest number is not rounded; else it is a
            power of two.
        smallest: no scale that is a power of two is below 2 to this.

    Returns:
        codes (M, K) contiguous and scales (M, 1) fp32: x = codes * scales to within a sixteenth of
        each number. A row with an infinity or NaN has the scale NaN.
    """
    factors = None if factor is None else (factor,)
    return fp8_quantize_joint((x,), factors, keep_largest=keep_largest, smallest=smallest)


def read_codes(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that codes (N, K) of a byte stand for: e4m3 is exact in bf16 and wider.

    Args:
        codes: contiguous; e4m3 as uint8, or int8.
        scales: (N, 1) fp32; of e4m3 powers of two.
        dtype: of the result.
    """
    codes = codes.view(FP8) if codes.dtype == torch.uint8 else codes
    if dtype in _KERNEL_DTYPES and codes.numel() and runs_kernel(scales):
        return kernel.launch_read_codes(codes, scales, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (codes.to(wide) * scales.to(wide)).to(dtype)


def fp8_quantize_joint(
    parts: Sequence[Tensor],
    factors: Sequence[Tensor] | None = None,
    *,
    keep_largest: bool = False,
    smallest: int = SMALLEST_EXPONENT,
) -> tuple[Tensor, Tensor]:
    """Several matrices side by side, with one scale for a row of all of them.

    Args:
        parts: (M, K_i) each.
        factors: (K_i,) fp32 each, or None.
        keep_largest: as `fp8_quantize`.
        smallest: as `fp8_quantize`.

    Returns:
        codes (M, sum of K_i) and scales (M, 1), as `fp8_quantize`.
    """
    if not all(part.is_floating_point() for part in parts):
        raise TypeError(f"rows of {parts[0].dtype} cannot be quantised; give floating numbers")
    rows = [as_rows(part) for part in parts]
    if factors is not None:
        factors = [factor.flatten() for factor in factors]
    if not _takes_kernel(*rows) or not rows[0].shape[1]:
        return fp8_quantize_joint_reference(rows, factors, keep_largest, smallest)
    if len(rows) > kernel.MAX_PARTS:
        rows = [torch.cat(rows, dim=1)]
        factors = None if factors is None else [torch.cat(list(factors))]
    return kernel.launch_quantize(rows, factors, keep_largest, smallest)


def fp8_quantize_both(
    parts: Sequence[Tensor], column_factors: Sequence[Tensor], row_factor: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients as both products of a backward pass want them.

    Args:
        parts: dy (M, N_i) of layers that share their input.
        column_factors: (N_i,) fp32 each, multiplied in for the first two results.
        row_factor: (M,) fp32, multiplied in for the last two.

    Returns:
        codes (M, sum of N_i) and scales (M, 1), as `fp8_quantize_joint`; then the codes of each
        part transposed, below each other (sum of N_i, M), and their scales (sum of N_i, 1). The
        latter's columns are padded with zeros to a multiple of 16, which products ask for.
    """
    rows = [as_rows(part) for part in parts]
    factors = [factor.flatten() for factor in column_factors]
    row_factor = row_factor.flatten()
    if not _takes_kernel(*rows) or not all(part.shape[1] for part in rows):
        return fp8_quantize_both_reference(rows, factors, row_factor)
    return (*fp8_quantize_joint(rows, factors), *columns_kernel.launch_columns(rows, row_factor))


def fp8_quantize_columns(
    x: Tensor, row_factor: Tensor, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Columns of rows or of their codes, for a product that contracts over the rows.

    Args:
        x: (M, K), or codes (M, K).
        row_factor: (M,) fp32, multiplied in.
        scales: (K, 1) fp32, powers of two, where they are known: x is read once then.

    Returns:
        codes (K, M) and scales (K, 1); the former's columns are padded with zeros to a multiple of
        16, which products ask for.
    """
    rows, row_factor = as_rows(x), row_factor.flatten()
    has_kernel = _has_kernels(rows) if rows.dtype == FP8 else _takes_kernel(rows)
    if not has_kernel or not rows.shape[1]:
        return fp8_quantize_columns_reference(rows, row_factor, scales)
    return columns_kernel.launch_columns([rows], row_factor, scales)


def fp8_gate(gate: Tensor, up: Tensor, *, tanh_gelu: bool = False) -> tuple[Tensor, Tensor]:
    """The rows of ``h = act(gate) * up`` in e4m3, their largest numbers kept; h is in no memory.

    Args:
        gate: (M, F).
        up: shape and dtype of gate.
        tanh_gelu: the activation is the tanh GELU instead of SiLU.
    """
    if not _holds_row(gate, up):
        return fp8_gate_reference(gate, up, tanh_gelu)
    return gate_kernel.launch_gate(as_rows(gate), as_rows(up), tanh_gelu)


def fp8_gate_backward(
    gate: Tensor,
    up: Tensor,
    dh: Tensor,
    factors: Sequence[Tensor],
    h_scales: Tensor,
    *,
    tanh_gelu: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """What comes back through the gate, in e4m3, and h again; neither is in memory in 16 bits.

    Args:
        gate: (M, F).
        up: shape and dtype of gate.
        dh: shape and dtype of gate.
        factors: (F,) each, powers of two that multiply dgate and dup first.
        h_scales: (M, 1), of the forward pass.
        tanh_gelu: as `fp8_gate`.

    Returns:
        codes (M, 2F) of dgate and dup side by side and their scales (M, 1), as
        `fp8_quantize_joint`; the codes of h (M, F).
    """
    if not _holds_row(gate, up, dh):
        return fp8_gate_backward_reference(gate, up, dh, factors, h_scales, tanh_gelu)
    narrow = [factor.flatten().to(torch.bfloat16) for factor in factors]
    gate, up, dh = map(as_rows, (gate, up, dh))
    return gate_kernel.launch_gate_back(gate, up, dh, narrow, h_scales, tanh_gelu)


def _holds_row(*rows: Tensor) -> bool:
    """Whether the gate's kernels serve these operands."""
    width = rows[0].shape[1]
    fits = 0 < width <= gate_kernel.MAX_WIDTH if HAS_TRITON else False
    return fits and rows[0].dtype == torch.bfloat16 and _takes_kernel(*rows)


def fp8_transpose(parts: Sequence[Tensor]) -> Tensor:
    """Weights that share an input, transposed and side by side."""
    if parts[0].dtype == FP8 and _has_kernels(parts[0]):
        return transpose_kernel.launch_transpose(parts)
    return fp8_transpose_reference(parts)


def fp8_matmul(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``(a a_scales) (b b_scales)^T + bias`` on the tensor cores for e4m3; emulated on a CPU.

    The GPU adds with fewer bits than fp32 ("fast accumulation").

    Args:
        a: codes (M, K) contiguous.
        a_scales: (M, 1) fp32.
        b: codes (N, K) contiguous; N and K multiples of 16 (`fits_fp8`).
        b_scales: (N, 1) fp32.
        bias: (N,) or None.
        out: (M, N) bf16 contiguous, to be written.

    Returns:
        (M, N) in bf16.
    """
    if a.dtype != FP8 or not is_on_gpu(a) or not a.shape[0]:
        result = fp8_matmul_reference(a, a_scales, b, b_scales, bias)
        return result if out is None else out.copy_(result)
    with device_of(a):
        return torch._scaled_mm(
            a,
            b.t(),
            scale_a=a_scales,
            scale_b=b_scales.view(1, -1),
            bias=None if bias is None else bias.to(torch.bfloat16),
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
            **({} if out is None else {"out": out}),
        )


def _takes_kernel(*rows: Tensor) -> bool:
    """One kernel reads all parts: they must have one dtype that it knows."""
    same = all(each.dtype == rows[0].dtype for each in rows)
    return same and rows[0].dtype in _KERNEL_DTYPES and runs_kernel(*rows) and _is_fit(rows[0])


def _has_kernels(codes: Tensor) -> bool:
    like = codes.new_empty(0, dtype=torch.bfloat16)
    return runs_kernel(like) and is_plain(codes) and _is_fit(codes)


def _is_fit(tensor: Tensor) -> bool:
    return not tensor.is_cuda or why_no_fp8(tensor.device) is None
