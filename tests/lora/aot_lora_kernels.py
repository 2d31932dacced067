"""Compile the adapters' kernels for GPUs that are not here; run as a script, without interpreter.

Prints one line a kernel, architecture and rank; fails on an error or on more shared memory than the
architecture has.
"""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trainkit.kernels.lora import gate, kernel, products
from trainkit.kernels.lora.tma import kernel as tma_kernel
from trainkit.kernels.lora.tma import launcher

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
SUMS = {"xa_down_ptr", "parts_ptr"}


def constants_of(name, lora_rank):
    """What the launchers pass for bf16, by kernel."""
    padded = products.pad_rank(lora_rank)
    shared = {"R_PAD": padded, "PRECISION": "tf32"}
    ranks = {"R_GATE": lora_rank, "R_UP": lora_rank, "R_DOWN": lora_rank, "TANH_GELU": False}
    if name == "cast_kernel":
        return {"BLOCK": 1024}, 4
    if name == "rows_kernel":
        block = 64 if padded <= 64 else 128
        stages = 4 if padded <= 64 else 3
        values = {"R": lora_rank, "BLOCK_M": block, "BLOCK_K": 128, "STAGES": stages}
        return shared | values, 4 if block == 64 else 8
    if name == "columns_kernel":
        stages = 4 if padded <= 64 else 2
        return shared | {"R": lora_rank, "BLOCK_N": 128, "BLOCK_M": 64, "STAGES": stages}, 4
    forward = name.startswith("gate_forward")
    if is_for_hopper(name):
        tile = launcher.FORWARD if forward else launcher.BACKWARD
    else:
        tile = (gate.FORWARD_TILES if forward else gate.BACKWARD_TILES)[2]
    values = {"BLOCK_F": tile.features, "BLOCK_M": tile.tokens, "STAGES": tile.stages}
    if not forward:
        values["R_MAX"] = lora_rank
    return shared | ranks | values, tile.warps


def is_for_hopper(name):
    return "tma" in name


def compile_for(arch, name, lora_rank):
    jitted = getattr(tma_kernel if is_for_hopper(name) else kernel, name)
    constants, warps = constants_of(name, lora_rank)
    signature, attributes = {}, {}
    for index, argument in enumerate(jitted.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument.endswith("_tiles"):
            signature[argument] = f"tensordesc<bf16[{constants['BLOCK_M']},{constants['BLOCK_F']}]>"
        elif argument.startswith("ptr_"):
            signature[argument] = "*fp32"
        elif argument.endswith("_ptr"):
            is_sum = argument in SUMS or (name == "columns_kernel" and argument == "out_ptr")
            signature[argument] = "*fp32" if is_sum else "*bf16"
        else:
            signature[argument] = "fp32" if argument.startswith("scale") else "i32"
        if argument.endswith("_ptr") or argument in ("gate_stride", "x_stride", "num_cols"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    places = {(jitted.arg_names.index(key),): value for key, value in constants.items()}
    source = ASTSource(fn=jitted, signature=signature, constexprs=places, attrs=attributes)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps}
    )
    assert compiled.metadata.shared <= SHARED_BYTES[arch], (name, compiled.metadata.shared)
    assert compiled.asm["cubin"]
    print(arch, name, lora_rank, flush=True)


if __name__ == "__main__":
    for arch in SHARED_BYTES:
        for name in sys.argv[1:]:
            if is_for_hopper(name):
                ranks = (8, launcher.MAX_RANK) if arch == 90 else ()
            else:
                ranks = (16, gate.MAX_GATE_RANK if name.startswith("gate") else products.MAX_RANK)
            for lora_rank in ranks:
                compile_for(arch, name, lora_rank)
