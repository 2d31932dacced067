"""Step 2: the Triton kernels; N elements."""

import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def forward(gate_ptr, up_ptr, out_ptr, N, BLOCK: tl.constexpr):
    WIDE: tl.constexpr = tl.float64 if gate_ptr.dtype.element_ty == tl.float64 else tl.float32
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + at, mask=at < N, other=0.0).to(WIDE)
    up = tl.load(up_ptr + at, mask=at < N, other=0.0).to(WIDE)
    activated = (gate / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty).to(WIDE)
    tl.store(out_ptr + at, (activated * up).to(out_ptr.dtype.element_ty), mask=at < N)


@triton.jit
def backward(gate_ptr, up_ptr, dy_ptr, dgate_ptr, dup_ptr, N, BLOCK: tl.constexpr):
    WIDE: tl.constexpr = tl.float64 if gate_ptr.dtype.element_ty == tl.float64 else tl.float32
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + at, mask=at < N, other=0.0).to(WIDE)
    up = tl.load(up_ptr + at, mask=at < N, other=0.0).to(WIDE)
    dy = tl.load(dy_ptr + at, mask=at < N, other=0.0).to(WIDE)
    s = 1.0 / (1.0 + tl.exp(-gate))
    dgate = dy * up * s * (1.0 + gate * (1.0 - s))
    tl.store(dgate_ptr + at, dgate.to(dgate_ptr.dtype.element_ty), mask=at < N)
    tl.store(dup_ptr + at, (dy * gate * s).to(dup_ptr.dtype.element_ty), mask=at < N)
