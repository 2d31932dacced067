"""Each kernel that quantises, by itself: a part of `speed.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def kernels_alone(size: Any, device: Any) -> Iterator[dict[str, Any]]:
    """Each kernel that quantises, by itself, and which share of a copy's speed it reaches."""
    import torch

    from trainkit.bench.measure.ceilings import warm_up
    from trainkit.bench.measure.clock import timed
    from trainkit.kernels.fp8 import columns_kernel, gate_kernel
    from trainkit.kernels.fp8 import function as fp8

    tokens = size.batch_size * size.length
    hidden, width = size.config["hidden_size"], size.config["intermediate_size"]
    gate, up, dh = (torch.randn(tokens, width, device=device).bfloat16() for _ in range(3))
    x, target = dh[:, :hidden].contiguous(), torch.empty_like(gate)
    rows = torch.ones(tokens, device=device)
    factors = [torch.ones(width, device=device) for _ in range(2)]
    narrow, scales = fp8.fp8_gate(gate, up)
    codes = fp8.fp8_gate_backward(gate, up, dh, factors, scales)[0]
    x_codes = fp8.fp8_quantize(x)[0]
    columns = torch.ones(hidden, 1, device=device)
    wide, slim = tokens * width, tokens * hidden

    def back() -> Any:
        return fp8.fp8_gate_backward(gate, up, dh, factors, scales)

    _check_columns(x_codes, scales)

    def with_tiles(call: Callable[[], Any], **tiles: Any) -> Callable[[], Any]:
        def run() -> Any:
            usual = {name: getattr(columns_kernel, name) for name in tiles}
            vars(columns_kernel).update(tiles)
            try:
                return call()
            finally:
                vars(columns_kernel).update(usual)

        return run

    def turned() -> Any:
        return fp8.fp8_quantize_columns(x_codes, rows)

    def known() -> Any:
        return fp8.fp8_quantize_columns(x_codes, rows, columns)

    def with_warps(number: int, call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            usual = gate_kernel._warps
            gate_kernel._warps = lambda *_: number  # type: ignore[assignment]
            try:
                return call()
            finally:
                gate_kernel._warps = usual

        return run

    calls: dict[str, tuple[int, Callable[[], Any]]] = {
        "copy": (4 * wide, lambda: target.copy_(gate)),
        "gate": (5 * wide, lambda: fp8.fp8_gate(gate, up)),
        "gate, 8 warps": (5 * wide, with_warps(8, lambda: fp8.fp8_gate(gate, up))),
        "gate backward": (9 * wide, back),
        "gate backward, 8 warps": (9 * wide, with_warps(8, back)),
        "gate backward, 32 warps": (9 * wide, with_warps(32, back)),
        "transpose h": (2 * wide, lambda: fp8.fp8_transpose([narrow])),
        "transpose the gradients": (4 * wide, lambda: fp8.fp8_transpose([codes])),
        "rows of h": (3 * wide, lambda: fp8.fp8_quantize(gate, keep_largest=True)),
        "rows of x": (3 * slim, lambda: fp8.fp8_quantize(x, keep_largest=True)),
        "rows and columns of x": (
            6 * slim,
            lambda: fp8.fp8_quantize_both([x], [rows[:hidden]], rows),
        ),
        "columns of x": (5 * slim, lambda: fp8.fp8_quantize_columns(x, rows)),
        "columns of x's codes": (3 * slim, turned),
        "columns of x's codes, 256 rows in turns of 16": (
            3 * slim,
            with_tiles(turned, FIRST=(16, 16, 256, 4)),
        ),
        "columns of x's codes, 128 rows in turns of 32": (
            3 * slim,
            with_tiles(turned, FIRST=(4, 32, 256, 4)),
        ),
        "columns of x's codes, known scales": (2 * slim, known),
        "columns of x's codes, known scales, 128 columns": (
            2 * slim,
            with_tiles(known, SECOND=(32, 128, 4)),
        ),
        "columns of x's codes, known scales, 128 columns, 8 warps": (
            2 * slim,
            with_tiles(known, SECOND=(32, 128, 8)),
        ),
        "columns of x's codes, known scales, 256 rows": (
            2 * slim,
            with_tiles(known, SECOND=(64, 64, 4)),
        ),
    }
    speed = 0.0
    for name, (moved, call) in calls.items():
        call()
        warm_up(call, seconds=0.3 if device.type == "cuda" else 0.0)
        milliseconds, _ = timed(call, 30 if device.type == "cuda" else 1, device)
        speed = speed or moved / milliseconds
        yield {"policy": name, "ms": milliseconds, "of_copy": moved / milliseconds / speed}


def _check_columns(codes: Any, scales: Any) -> None:
    """That this GPU gives the reference's bits."""
    import torch

    from trainkit.kernels.fp8.function import fp8_quantize_columns
    from trainkit.kernels.fp8.reference import fp8_quantize_columns_reference

    for x in (codes, codes.bfloat16()):
        for found, wanted in zip(
            fp8_quantize_columns(x, scales),
            fp8_quantize_columns_reference(x, scales.flatten(), None),
            strict=True,
        ):
            if not torch.equal(found.float(), wanted.float()):
                raise AssertionError(f"columns of {x.dtype} are not the reference's")
