"""Compile every kernel for a GPU that is not here: python aot_kernels.py ARCH [every]

Run without TRITON_INTERPRET. The ops are called on CPU tensors with the launch replaced, so what is
compiled is exactly what a launch would ask for. Prints one line a kernel, and fails on an error or
on more shared memory than the architecture has.
"""

import itertools
import sys

import torch
import triton
from op_cases.norms import rms_norm_case
from op_cases.op import Case, TriedOp
from op_cases.table import OPS
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trainkit.kernels import add_rms_norm, launch, rms_norm
from trainkit.kernels.adamw.function import add_square_sum_
from trainkit.kernels.adamw_8bit.function import adamw_8bit_
from trainkit.kernels.contract import Draw, run
from trainkit.kernels.cross_entropy.function import LossOptions, cross_entropy_chunk
from trainkit.kernels.fp8.function import (
    SMALLEST_CAPABILITY,
    fp8_gate,
    fp8_gate_backward,
    fp8_quantize,
    fp8_quantize_both,
)
from trainkit.kernels.linear_cross_entropy.teacher import KINDS, DivergenceOptions, Teacher

POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.float8_e4m3fn: "*fp8e4nv",
}
SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}
# composed of other ops' kernels; and one whose kernels take descriptors, which a GPU's driver makes
LARGE = {"gated_delta_rule"}  # small heads would fit anywhere
WHOLE = {"linear_cross_entropy", "linear_divergence", "moe_mlp"}


def compile_for(arch, kernel, pointers, strides, free, constants, num_warps, num_stages):
    names = kernel.jitted.arg_names
    values = [*pointers, *strides, *free, *constants]
    assert len(names) == len(values)
    signature, constexprs, attributes = {}, {}, {}
    for index, (name, value) in enumerate(zip(names, values, strict=True)):
        if index < len(pointers):
            signature[name] = POINTERS[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif index < len(values) - len(constants):
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if index < len(pointers) + len(strides) and value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "constexpr"
            constexprs[(index,)] = value
    source = ASTSource(kernel.jitted, signature, constexprs, attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    assert compiled.metadata.shared <= SHARED_BYTES[arch], (name, compiled.metadata.shared)
    assert compiled.asm["cubin"]


WIDE = (4096, 8192, 65536)  # hidden sizes at which a row no longer leaves room for others


def wide_cases(spec: TriedOp) -> list[Case]:
    """Rows so wide that shared memory decides how they are read."""
    if not spec.name.endswith("norm"):
        return []
    name = spec.name
    kind = {"residual": name[:3] == "add", "bias": "layer" in name, "gate": name[:5] == "gated"}
    return [rms_norm_case(str(width), (2, width), **kind) for width in WIDE]


def calls(spec: TriedOp, every: bool) -> list[Case]:
    """One that a real model would bring; and if ``every``, each set of options and gradients."""
    kinds = {(tuple(case.options.items()), case.grads): case for case in reversed(spec.cases)}
    if not every:
        kinds.clear()
    large = [case for case in spec.cases if case.large][:1] if spec.name in LARGE else []
    return [*kinds.values(), spec.cases[1], *large]


def quantise_what_models_bring() -> None:
    """Rows of a model's sizes in e4m3, from their own kernel and out of the norms."""
    for width in (896, 3584, 18944):
        x = torch.ones(2, width, dtype=torch.bfloat16)
        fp8_quantize(x)
        fp8_quantize(x, x[0].float())
        fp8_quantize_both([x], [x[0].float()], x[:, 0].float())
        _, scales = fp8_gate(x, x)
        fp8_gate_backward(x, x, x, (x[0], x[0]), scales)
        if width < 8192:
            rms_norm(x, x[0], fp8_rows=True)
            add_rms_norm(x, x, x[0], fp8_rows=True)
    labels, losses = torch.zeros(2, dtype=torch.int64), torch.zeros(2)
    codes = x.to(torch.float8_e4m3fn), torch.zeros(2, 1)
    for wide in (False, True):
        cross_entropy_chunk(x, labels, losses, 1.0, want_grad=wide, codes_out=codes)


def compare_with_a_teacher() -> None:
    """What a distillation brings besides products."""
    logits, labels = torch.ones(2, 40000, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64)
    for kind, cap in itertools.product(KINDS, (None, 30.0)):
        options = DivergenceOptions(kind, temperature=2.0 if cap else 1.0, sft_weight=0.1)
        teacher = Teacher(logits[:, :8], logits.view(-1, 8), None, cap, options)
        teacher.begin(torch.bfloat16, None, 2, 2)
        given = (slice(2), logits, labels, torch.zeros(2), 1.0, LossOptions(softcap=cap))
        teacher.compare(*given, want_grad=True)


def step_in_the_backward_pass() -> None:
    """What weights without masters bring besides `adamw_8bit`: their norm, and moments in fp32."""
    weight, zero = torch.ones(2048, dtype=torch.bfloat16), torch.zeros(())
    add_square_sum_(weight, zero, zero)
    moments = torch.zeros(2048), torch.zeros(2048)
    adamw_8bit_(
        weight, weight, moments, None, zero, zero, seed=2**61, step=1, lr=1e-3, beta1=0.9,
        beta2=0.999, eps=1e-8, weight_decay=0.0,
    )  # fmt: skip


def main(arch: int, every: bool) -> None:
    seen = set()

    def record(
        self, programs, pointers, strides, free, constants, num_warps, num_stages=1, products=0
    ):
        kinds = tuple(pointer.dtype for pointer in pointers)
        key = (self.jitted.__name__, kinds, constants, num_warps, num_stages)
        if key not in seen:
            seen.add(key)
            compile_for(arch, self, pointers, strides, free, constants, num_warps, num_stages)
            print(arch, self.jitted.__module__, self.jitted.__name__, flush=True)

    launch.Kernel.launch = record
    launch.INTERPRETING = True  # CPU tensors take the kernels' road
    launch.SMALLEST_SHARED_BYTES = SHARED_BYTES[arch]
    if arch >= SMALLEST_CAPABILITY[0] * 10 + SMALLEST_CAPABILITY[1]:
        quantise_what_models_bring()
    step_in_the_backward_pass()
    compare_with_a_teacher()
    for spec in OPS.values():
        if spec.name in WHOLE or arch < spec.smallest_target:
            continue
        # In fp32 a tile takes twice the room; the wide rows matter there only.
        for dtype, cases in (
            (torch.bfloat16, calls(spec, every)),
            (torch.float32, [spec.cases[1], *wide_cases(spec)]),
        ):
            for case in cases:
                inputs = case.inputs(Draw.seeded(dtype, "cpu", 0))
                run(spec.function, case, inputs, torch.ones_like)


if __name__ == "__main__":
    main(int(sys.argv[1]), "every" in sys.argv)
