"""Compile every kernel for GPUs that are not here: python aot_kernels.py ARCH[,ARCH] [every]

Run without TRITON_INTERPRET. The ops are called on CPU tensors with the launch replaced, so what is
compiled is exactly what a launch would ask for. Prints one line a kernel, and fails on an error or
on on more shared memory than the architecture has. A second architecture is compiled for where a
launch is another one there, or shared memory may not suffice. Without `every`, what walks the same
code stands in for its likes: norms in fp32 and wide by the kinds with the most operands.
"""

import itertools
import sys

import torch
import triton
from op_cases.lora import lora_case, lora_op
from op_cases.norms import rms_norm_case
from op_cases.op import Case, TriedOp
from op_cases.table import OPS
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

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
from trainkit.kernels.lora import gate, products

DRAW = Draw.seeded(torch.bfloat16, "cpu", 0)
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


def compile_for(arch, jitted, given, constants, specialized, **options):
    """``given``: every argument by name; ``specialized``: integers that Triton looks at."""
    signature, constexprs, attributes = {}, {}, {}
    for index, (name, value) in enumerate(given.items()):
        if name in constants:
            signature[name] = "constexpr"
            constexprs[(index,)] = value
        elif isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<bf16[{','.join(map(str, value.block_shape))}]>"
        elif isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        aligned = name in specialized and value % 16 == 0
        if signature[name].startswith("*") or aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(jitted, signature, constexprs, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    assert compiled.metadata.shared <= SHARED_BYTES[arch], (name, compiled.metadata.shared)
    assert compiled.asm["cubin"]
    return compiled.metadata.shared


WIDE = (4096, 8192, 65536)  # hidden sizes at which a row no longer leaves room for others


def in_fp32(spec: TriedOp, every: bool) -> list[Case]:
    """A tile takes twice the room; and of norms rows so wide that shared memory decides."""
    name = spec.name
    if not every and name not in ("add_layer_norm", "gated_rms_norm", "cross_entropy"):
        return []
    if not name.endswith("norm"):
        return [spec.cases[1]]
    kind = {"residual": name[:3] == "add", "bias": "layer" in name, "gate": name[:5] == "gated"}
    return [spec.cases[1], *(rms_norm_case(str(width), (2, width), **kind) for width in WIDE)]


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


def compare_with_a_teacher(every: bool) -> None:
    """What a distillation brings besides products."""
    logits, labels = torch.ones(2, 40000, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64)
    for kind, cap in itertools.product(KINDS, (None, 30.0) if every else (30.0,)):
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


def adapt_what_models_bring(arch: int) -> None:
    """Adapters at a usual rank and at the widest that the kernels take, by each of their ways."""

    def called(name: str, *shapes: tuple[int, int, int, bool]) -> None:
        case = lora_case(name, shapes, (64,))
        run(lora_op(name, shapes, shapes).function, case, case.inputs(DRAW), torch.ones_like)

    def ones(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype)

    for rank in (16, products.MAX_RANK):
        called("lora_linear", (256, 512, rank, False))
        products.add_product(ones(64, 256), ones(64, rank), ones(rank, 256))
        products.rows(ones(64, 512, dtype=torch.float32), ones(rank, 512, dtype=torch.float32))
    ways = {False: (16, gate.MAX_GATE_RANK), True: (gate.MAX_TILES_RANK,)}
    for tiles in (False, True) if arch == 90 else (False,):
        gate._takes_blocks = lambda *_, tiles=tiles: tiles
        for rank in ways[tiles]:
            up, down = (256, 512, rank, False), (512, 256, rank, False)
            called("lora_mlp", up, up, down)
        wide, inner, factor = ones(64, 512), ones(64, 16), ones(512, 16)
        operands = (wide, wide, inner, inner, factor, factor, factor.t().contiguous(), False)
        columns = ones(512, dtype=torch.float32)
        if arch == 90:
            gate.gate_backward(
                gate.GateOperands(*operands), wide, inner, wide, wide, (1.0, 1.0), (columns,) * 2
            )
    for rank in (0, 16, gate.MAX_GATE_RANK) if arch == 90 else ():
        b_pair = (ones(512, rank),) * 2 if rank else None
        largest = ones(4, 64, dtype=torch.int32)
        gate.codes_of_gradients(ones(2, 64, 512), (columns,) * 2, largest, b_pair)


def main(arch: int, every: bool, seen: dict[object, int]) -> None:
    """``seen``: shared memory of each launch that another architecture has compiled."""
    done = set()

    def compile_once(jitted, given, constants, specialized, **options):
        kinds = tuple(each.dtype for each in given.values() if isinstance(each, torch.Tensor))
        values = tuple(value for name, value in given.items() if name in constants)
        key = (jitted.__name__, kinds, values, *options.values())
        if key in done or seen.get(key, SHARED_BYTES[arch]) < SHARED_BYTES[arch] * 3 // 4:
            return
        done.add(key)
        shared = compile_for(arch, jitted, given, constants, specialized, **options)
        seen[key] = max(shared, seen.get(key, 0))
        print(arch, jitted.__module__, jitted.__name__, flush=True)

    def record(
        self, programs, pointers, strides, free, constants, num_warps, num_stages=1, products=0
    ):
        names = self.jitted.arg_names
        given = dict(zip(names, [*pointers, *strides, *free, *constants], strict=True))
        looked_at = names[len(pointers) : len(pointers) + len(strides)]
        options = {"num_warps": num_warps, "num_stages": num_stages}
        compile_once(self.jitted, given, names[-len(constants) :], looked_at, **options)

    def record_jitted(jitted, grid, on, *arguments, **options):
        names = jitted.arg_names
        constants = {name: options.pop(name) for name in names if name in options}
        given = dict(zip(names, arguments, strict=False)) | constants
        given = {name: given[name] for name in names}
        strides = [name for name in names if name.endswith("_stride")]
        compile_once(jitted, given, [*constants], strides, **options)

    launch.Kernel.launch = record
    gate.run_jitted = record_jitted
    launch.INTERPRETING = True  # CPU tensors take the kernels' road
    launch.SMALLEST_SHARED_BYTES = SHARED_BYTES[arch]
    if arch >= SMALLEST_CAPABILITY[0] * 10 + SMALLEST_CAPABILITY[1]:
        quantise_what_models_bring()
    adapt_what_models_bring(arch)
    step_in_the_backward_pass()
    compare_with_a_teacher(every)
    for spec in OPS.values():
        if spec.name in WHOLE or spec.name.startswith("lora") or arch < spec.smallest_target:
            continue
        for dtype, cases in (
            (torch.bfloat16, calls(spec, every)),
            (torch.float32, in_fp32(spec, every)),
        ):
            for case in cases:
                inputs = case.inputs(Draw.seeded(dtype, "cpu", 0))
                run(spec.function, case, inputs, torch.ones_like)


if __name__ == "__main__":
    known: dict[object, int] = {}
    for each in sys.argv[1].split(","):
        main(int(each), "every" in sys.argv, known)
