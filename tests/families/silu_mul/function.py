"""Step 3: the public function, which runs the kernel where there is one."""

import torch
from families.silu_mul import kernel
from families.silu_mul.reference import silu_mul_reference
from torch.autograd.function import once_differentiable

from trainkit.kernels.launch import device_of, empty_like, runs_kernel


def silu_mul(gate, up):
    if not runs_kernel(gate, up):
        return silu_mul_reference(gate, up)
    return _SiluMul.apply(gate, up)


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        out = empty_like(gate)
        with device_of(gate):
            grid = (-(-gate.numel() // kernel.BLOCK),)
            if gate.numel():
                kernel.forward[grid](
                    gate.contiguous(), up.contiguous(), out, gate.numel(), kernel.BLOCK
                )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        gate, up = ctx.saved_tensors
        dgate, dup = empty_like(gate), empty_like(up)
        with device_of(gate):
            grid = (-(-gate.numel() // kernel.BLOCK),)
            if gate.numel():
                kernel.backward[grid](
                    *(each.contiguous() for each in (gate, up, dy)),
                    *(dgate, dup, gate.numel(), kernel.BLOCK),
                )
        return dgate, dup
