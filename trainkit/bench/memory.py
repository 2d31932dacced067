"""Peak memory by owner, and step time, over models, adapters and recompute: for the estimator.

Points run one after another on one GPU, each in a process of its own. A trainkit point is some
optimizer steps of the real Trainer, with fp32 masters, clipping and fused AdamW; an ``hf`` point is
a bare step of plain transformers (and peft), a ``bare`` point one of trainkit's model: forward and
backward, and AdamW where there are adapters. Weights and tokens are random.

A row also has what the estimate says of its point.

    python -m trainkit.bench.memory [--only WORD ...] [--output FILE] [--seconds N] [--not-in FILE]
                                    [--one-process] [--estimate]

With ``--one-process`` no other process starts: many small points take little time, and the host is
quiet while they run.
"""

import argparse
import contextlib
import gc
import importlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainkit.bench import lora
from trainkit.bench.measure.processes import Fresh
from trainkit.bench.measure.record import append, environment
from trainkit.bench.memory_points import POINTS, SHAPES, Point, plan_of
from trainkit.bench.providers import Shape, build, provide
from trainkit.bench.through_trainer import Cell, make_trainer
from trainkit.estimate.gpus import GPUS, gpu_named
from trainkit.estimate.peak import peak
from trainkit.estimate.speed import seconds as step_seconds
from trainkit.models.fp8.groups import find_candidates
from trainkit.models.fp8.trained import swap_in
from trainkit.models.fp8_rows import let_norms_quantize
from trainkit.options import Fp8Options
from trainkit.train.callbacks import KeepFp8Codes
from trainkit.train.optimizer.make import OptimizerPlan
from trainkit.train.recompute.callback import RecomputeLayers, Wanted

STEPS, MORE_STEPS, FEW_TOKENS = 6, 30, 1024
"""More where a step has so few tokens: what Python takes differs from step to step."""
GIB = 2**30


class _Marks:
    """Memory at the seams of a step, in GiB; the largest of all steps."""

    def __init__(self, model: nn.Module) -> None:
        self.values: dict[str, float] = {}
        head: Any = next(m for name, m in model.named_modules() if name.endswith("lm_head"))
        base = model if isinstance(getattr(model, "base_model", None), nn.Module) else head
        self._handles = [
            base.register_forward_pre_hook(lambda *_: self._note("before_forward")),
            head.register_forward_pre_hook(lambda *_: self._note("before_head")),
            base.register_forward_hook(lambda *_: self._note("after_forward", peak=True)),
        ]

    def _note(self, name: str, *, peak: bool = False) -> None:
        reads = {name: torch.cuda.memory_allocated()}
        if peak:
            reads["peak_forward"] = torch.cuda.max_memory_allocated()
        for key, value in reads.items():
            self.values[key] = max(self.values.get(key, 0.0), value / GIB)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def measure(point: Point, device: torch.device) -> dict[str, Any]:
    """Run a point's steps.

    Returns:
        peak_memory_gib (allocated), reserved_gib, weights_gib (after building), the memory at the
        seams of a step, and step_seconds, the median of the later steps, and that of the fastest.
    """
    shape = replace(SHAPES[point.model], batch_size=point.batch_size, length=point.length)
    on_gpu = device.type == "cuda"
    before = torch.cuda.memory_allocated() if on_gpu else 0
    model = model_of(point, shape, device)
    values: dict[str, Any] = {}
    if on_gpu:
        values["weights_gib"] = (torch.cuda.memory_allocated() - before) / GIB
        torch.cuda.reset_peak_memory_stats()
    marks = _Marks(model) if on_gpu else None
    run = _trained if point.provider == "trainkit" else _bare
    seconds = run(point, shape, model, device)
    values["step_seconds"] = statistics.median(seconds[len(seconds) // 3 :])
    values["fastest_step_seconds"] = min(seconds)
    values["tokens_per_second"] = (
        shape.batch_size * shape.length * point.accumulation / values["step_seconds"]
    )
    if on_gpu and marks is not None:
        values["peak_memory_gib"] = torch.cuda.max_memory_allocated() / GIB
        values["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
        values |= marks.values
    return values


def model_of(point: Point, shape: Shape, device: torch.device) -> Any:
    """The model of a point, with adapters and kernels; the Trainer checkpoints its own."""
    is_checkpointed = bool(point.recompute) and point.provider != "trainkit"
    if not point.mode.startswith("full"):
        cell = lora.Cell(
            point.model,
            "peft" if point.provider == "hf" else "trainkit",
            point.mode + ("_checkpointed" if is_checkpointed else ""),
            lora_rank=point.lora_rank,
            shape=shape,
        )
        model: Any = lora.build_cell(cell, device).train()
        if point.mode == "qlora":  # quantised in place, so without what the Trainer would ask
            for module in model.modules():
                module.__dict__.pop("is_quantized", None)
                module.__dict__.pop("is_loaded_in_4bit", None)
        return model
    if point.provider == "hf":
        model = build(shape, device, "sdpa")
    else:
        model = provide("trainkit", shape, device, loss_chunk_tokens=point.chunk_tokens).model
    if point.mode == "full_fp8":
        names = find_candidates(model, Fp8Options()).layers
        swap_in(model, dict.fromkeys(names, (True, True)))
        let_norms_quantize(model)
    if is_checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _steps(point: Point) -> int:
    return MORE_STEPS if point.batch_size * point.length <= FEW_TOKENS else STEPS


def _trained(point: Point, shape: Shape, model: Any, device: torch.device) -> list[float]:
    cell = Cell(point.model, steps=_steps(point), num_workers=0, shape=shape)
    more: dict[str, Any] = {
        "gradient_accumulation_steps": point.accumulation,
        "optim": point.optim,
        "optimizer_plan": OptimizerPlan(
            in_backward=point.in_backward,
            keeps_masters=point.keeps_masters,
            loss_chunk_tokens=point.chunk_tokens,
        ),
    }
    if not point.mode.startswith("full"):
        more["bf16"] = True  # as a recipe with adapters does
    if point.in_backward:
        more["max_grad_norm"] = 0.0
    if point.recompute:
        more["gradient_checkpointing"] = True
        more["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    with tempfile.TemporaryDirectory() as directory:
        trainer = make_trainer(cell, shape, model, device, Path(directory), **more)
        trainer.add_callback(RecomputeLayers(model, Wanted(point.options, point.offload)))
        if point.mode == "full_fp8":
            trainer.add_callback(KeepFp8Codes(model))
        trainer.train()
    return [row["step_seconds"] for row in trainer.state.log_history if "step_seconds" in row]


def _bare(point: Point, shape: Shape, model: Any, device: torch.device) -> list[float]:
    has_adapters = not point.mode.startswith("full")
    trained = [each for each in model.parameters() if each.requires_grad]
    is_fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=is_fused) if has_adapters else None
    generator = torch.Generator(device).manual_seed(1)
    size = (shape.batch_size, shape.length)
    tokens = torch.randint(0, shape.config["vocab_size"], size, generator=generator, device=device)
    seconds = []
    for _ in range(_steps(point)):
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=has_adapters):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        del loss
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds


def run(
    points: Sequence[Point], seconds: float = 3600.0, *, one_process: bool = False
) -> Iterator[dict[str, Any]]:
    """Measure the points one after another, each in a process of its own.

    A failure is a row, and the next point goes on.

    Args:
        points: what is measured.
        seconds: after which no other point is begun.
        one_process: all in this one.
    """
    end = time.monotonic() + seconds
    if one_process:
        for point in points:
            if time.monotonic() < end:
                yield {"bench": "memory", "case": point.name, **asdict(point), **row_of(point)}
                gc.collect()
                torch.cuda.empty_cache()
        return
    with Fresh(len(points), imports) as processes:
        for point in points:
            if time.monotonic() > end:
                return
            started = time.perf_counter()
            row = {"bench": "memory", "case": point.name, **asdict(point)}
            row |= processes.call(row_of, point, seconds=min(90.0, end - time.monotonic()))
            row["measured_in_seconds"] = round(time.perf_counter() - started, 1)
            yield row


def imports() -> None:
    """What takes long to import."""
    for name in ("peft", "bitsandbytes", "trainkit.lora", "transformers.models.llama"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def estimated(point: Point) -> dict[str, float]:
    """What the estimate says of a point, on the GPU at hand or else on an H200."""
    on_gpu = torch.cuda.is_available()
    gpu = (gpu_named(torch.cuda.get_device_name()) if on_gpu else None) or GPUS["h200"]
    plan = plan_of(point)
    return {
        "estimated_gib": peak(plan).gib,
        "estimated_tokens_per_second": plan.tokens * plan.accumulation / step_seconds(plan, gpu),
    }


def row_of(point: Point) -> dict[str, Any]:
    """What the estimate says of a point, and what was measured or its error."""
    on_gpu = torch.cuda.is_available()
    said = estimated(point)
    try:
        values = measure(point, torch.device("cuda" if on_gpu else "cpu"))
    except Exception as error:  # whatever it is, it is this point's row
        values = {"error": f"{type(error).__name__}: {error}"[:500]}
    if "peak_memory_gib" in values:
        values["off_memory"] = said["estimated_gib"] / values["peak_memory_gib"] - 1
    if "tokens_per_second" in values:
        speed = said["estimated_tokens_per_second"] / values["tokens_per_second"]
        values["off_speed"] = speed - 1
    return {**said, **values, **environment()}


def measured_in(file: Path) -> set[str]:
    """Names of the points that have a peak in a file of rows."""
    rows = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return {row["case"] for row in rows if "peak_memory_gib" in row}


def main() -> None:
    """Measure and print one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="words of names: those points, in this order")
    parser.add_argument("--output", type=Path, help="append the lines to this file")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no point after these")
    parser.add_argument("--not-in", type=Path, help="leave out points that have a peak there")
    parser.add_argument("--one-process", action="store_true", help="for all points")
    parser.add_argument("--estimate", action="store_true", help="run nothing, say beforehand")
    options = parser.parse_args()
    words = options.only or [""]
    chosen = list(dict.fromkeys(p for word in words for p in POINTS if word in p.name))
    if options.not_in is not None:
        done = measured_in(options.not_in)
        chosen = [point for point in chosen if point.name not in done]
    if options.estimate:
        for point in chosen:
            sys.stdout.write(json.dumps({"case": point.name, **estimated(point)}) + "\n")
        return
    for row in run(chosen, options.seconds, one_process=options.one_process):
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()
        if options.output is not None:
            append(options.output, [row])


if __name__ == "__main__":
    main()
