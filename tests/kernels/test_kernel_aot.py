"""Every kernel compiles and fits for A100, RTX 4090 and H100, on a machine without a GPU."""

import os
from pathlib import Path

import pytest
from commands import python

from trainkit.kernels import launch

SCRIPT = Path(__file__).with_name("aot_kernels.py")


@pytest.mark.skipif(launch.INTERPRETING, reason="compiles in the run without TRITON_INTERPRET")
@pytest.mark.skipif(not launch.HAS_TRITON, reason="no Triton")
@pytest.mark.sample("90,89")
@pytest.mark.parametrize("words", ["80", "89", "90,89", "90 every"])
def test_kernels_compile_ahead_of_time(words):
    environment = {**os.environ, "PYTHONPATH": f"{SCRIPT.parents[2]}:{SCRIPT.parents[1]}"}
    environment.pop("TRITON_INTERPRET", None)
    said = python("-W", "ignore", SCRIPT, *words.split(), env=environment, timeout=280)
    names = {line.split()[-1] for line in said.splitlines()}
    assert {"_rope", "cross_entropy_rows", "_sum_partials", "_packed_backward"} <= names
    adapters = {"cast_kernel", "columns_kernel", "rows_kernel", "add_product_kernel"}
    assert adapters | {"gate_backward_kernel", "gate_forward_kernel"} <= names


@pytest.mark.skipif(not launch.HAS_TRITON, reason="no Triton")
@pytest.mark.skipif(launch.INTERPRETING, reason="the interpreter has configurations of its own")
def test_the_norm_s_backward_fits_and_stays_as_it_was_measured():
    from trainkit.kernels.rms_norm.kernel import backward_config, fitting

    kib = 1024
    for limit in (64 * kib, 99 * kib, 163 * kib, 227 * kib):
        for hidden in (2, 128, 896, 2048, 3584, 4096, 8192, 16384, 65536):
            block, block_rows, _, stages, _ = backward_config(hidden)
            for width in (4, 6, 8, 12, 24):
                rows, kept = fitting(block, block_rows, stages, width, limit)
                assert rows >= 1 <= kept
                assert rows * block * width * (kept - 1) < limit
                # H100 and H200, a model's sizes in bf16: as measured.
                if limit == 227 * kib and width <= 6 and hidden <= 16384:
                    assert (rows, kept) == (block_rows, stages)
