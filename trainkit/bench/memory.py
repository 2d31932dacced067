"""Peak memory by owner, and step time, over models, adapters and recompute: for the estimator.

Points run one after another on one GPU, each in a process of its own. A trainkit point is some
optimizer steps of the real Trainer, with fp32 masters, clipping and fused AdamW; an ``hf`` point is
a bare step of plain transformers (and peft), a ``bare`` point one of trainkit's model: forward and
backward, and AdamW where there are adapters. Weights and tokens are random.

Beside what was measured a row has what the estimate said, before the point was run.

    python -m trainkit.bench.memory [--only WORD ...] [--output FILE] [--seconds N]
"""

import argparse
import contextlib
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainkit.bench import lora
from trainkit.bench.measure.processes import Fresh
from trainkit.bench.measure.record import append, environment
from trainkit.bench.providers import Shape, build, provide
from trainkit.bench.through_trainer import Cell, make_trainer
from trainkit.estimate.gpus import GPUS, gpu_named
from trainkit.estimate.peak import peak
from trainkit.estimate.plan import Adapters, Plan
from trainkit.estimate.shape import find_shape
from trainkit.estimate.speed import seconds as step_seconds
from trainkit.estimate.state import optimizer_bytes
from trainkit.models.fp8.groups import find_candidates
from trainkit.models.fp8.trained import swap_in
from trainkit.models.fp8_rows import let_norms_quantize
from trainkit.options import Fp8Options, RecomputeOptions
from trainkit.options.optimizers import optimizer_row
from trainkit.train.callbacks import KeepFp8Codes
from trainkit.train.optimizer.make import OptimizerPlan
from trainkit.train.recompute.callback import RecomputeLayers, Wanted

STEPS = 6
GIB = 2**30


_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


def _shape(family: str, *sizes: int, tie: bool = False, **more: Any) -> Shape:
    config: dict[str, Any] = dict(zip(_SIZES, sizes, strict=True))
    config |= {"tie_word_embeddings": tie, "max_position_embeddings": 32768, **more}
    return Shape(family, config, 1, 2048)


SHAPES: dict[str, Shape] = {
    **lora.SHAPES,
    "qwen2.5-3b": _shape("qwen2", 2048, 11008, 36, 16, 2, 151936, tie=True),
    "qwen3-1.7b": _shape("qwen3", 2048, 6144, 28, 16, 8, 151936, tie=True, head_dim=128),
    "llama-3.2-3b": _shape("llama", 3072, 8192, 28, 24, 8, 128256, tie=True, head_dim=128),
    "llama-3.1-8b": _shape("llama", 4096, 14336, 32, 32, 8, 128256),
    "mistral-7b": _shape("mistral", 4096, 14336, 32, 32, 8, 32768, sliding_window=None),
}


@dataclass(frozen=True)
class Point:
    """What is measured.

    Args:
        model: a key of `SHAPES`.
        mode: "full", "full_fp8" (all products in fp8), or a mode of `trainkit.bench.lora`.
        batch_size: sequences in a micro-batch.
        length: tokens in each.
        provider: "trainkit" through the Trainer, "bare" trainkit, or "hf".
        recompute: every so many layers are recomputed; 0 keeps all.
        selective: of these, matrix products and attention are kept.
        offload: inputs of recomputed layers wait on the host.
        lora_rank: of every adapter.
        accumulation: micro-batches in a step.
        optim: a name of ``training.optim``.
        keeps_masters: half-precision weights have fp32 copies.
        in_backward: weights step in the backward pass.
        chunk_tokens: tokens whose logits exist at a time; None is the default.
    """

    model: str
    mode: str
    batch_size: int
    length: int = 2048
    provider: str = "trainkit"
    recompute: int = 0
    selective: bool = False
    offload: bool = False
    lora_rank: int = 16
    accumulation: int = 1
    optim: str = "adamw_torch_fused"
    keeps_masters: bool = True
    in_backward: bool = False
    chunk_tokens: int | None = None

    @property
    def name(self) -> str:
        """For a line of output."""
        how = "selective" if self.selective else "recompute"
        return (
            f"{self.provider} {self.model} {self.mode} {self.batch_size}x{self.length}"
            + (f" {how}" if self.recompute == 1 else "")
            + (f" every {self.recompute}" if self.recompute > 1 else "")
            + (" offload" if self.offload else "")
            + (f" accumulation {self.accumulation}" if self.accumulation > 1 else "")
            + (f" {self.optim}" if self.optim != "adamw_torch_fused" else "")
            + ("" if self.keeps_masters else " without masters")
            + (" in backward" if self.in_backward else "")
        )

    @property
    def options(self) -> RecomputeOptions | None:
        """As ``recompute`` has it."""
        if not self.recompute:
            return None
        return RecomputeOptions(every=self.recompute, selective=self.selective)


def plan_of(point: Point) -> Plan:
    """What the estimate is asked for a point."""
    shape, is_full = find_shape(point.model), point.mode.startswith("full")
    row = optimizer_row(point.optim)
    state: float | None = optimizer_bytes(row, shape, full=is_full)
    if is_full and point.provider != "trainkit":
        state = None
    plan = Plan(
        shape,
        point.batch_size,
        point.length,
        accumulation=point.accumulation,
        base={"qlora": "nf4", "fp8": "fp8"}.get(point.mode, "bfloat16"),
        adapters=None if is_full else Adapters(rank=point.lora_rank, offload=point.offload),
        fp8="all" if point.mode == "full_fp8" else "none",
        recompute=point.recompute,
        selective=point.selective,
        offload=point.offload,
        trainer=point.provider == "trainkit",
        keeps_masters=point.keeps_masters,
        in_backward=point.in_backward,
        flat=point.optim == "flat_adamw",
        optimizer=state,
        chunk_tokens=point.chunk_tokens,
    )
    if point.provider == "hf":
        plan = replace(plan, ops=frozenset(), upcast=point.mode == "qlora")
    return plan


LEAST = Point(
    "llama-3.1-8b",
    "full",
    2,
    recompute=1,
    offload=True,
    optim="paged_adamw_8bit",
    keeps_masters=False,
    in_backward=True,
    chunk_tokens=512,
)
"""The shipped recipe for 18 GiB."""

POINTS: tuple[Point, ...] = (
    LEAST,
    Point("qwen2-0.5b", "full", 8, 4096),
    Point("qwen2-0.5b", "full", 2, 1024, accumulation=4),
    Point("qwen2-1.5b", "full", 4, selective=True, recompute=1),
    Point("qwen2-1.5b", "full", 8, recompute=1),
    Point("qwen2-1.5b", "full", 4, optim="flat_adamw"),
    Point("llama-3.2-1b", "full", 8, 1024, optim="adamw_8bit"),
    Point("llama-3.2-1b", "full_fp8", 4),
    Point("llama-3.2-3b", "full", 2, recompute=2),
    Point("qwen2.5-3b", "full", 4, recompute=1, optim="adafactor"),
    Point("qwen3-1.7b", "full", 4, optim="muon"),
    Point("qwen2-0.5b", "lora", 8, lora_rank=8),
    Point("llama-3.1-8b", "lora", 2),
    Point("llama-3.1-8b", "qlora", 4, recompute=1),
    Point("mistral-7b", "lora", 1, 4096, lora_rank=64, recompute=3),
    Point("mistral-7b", "qlora", 2),
    Point("glm4-9b", "lora", 2),
    Point("llama-3.1-8b", "fp8", 2, recompute=1, offload=True),
    Point("qwen2.5-3b", "lora", 8, recompute=1, offload=True),
    Point("qwen2-1.5b", "full", 4, provider="hf"),
    Point("llama-3.1-8b", "lora", 1, provider="hf"),
    Point("mistral-7b", "qlora", 2, provider="hf", recompute=1),
)
"""Sizes from 0.5B to 9B, none of them a row of the other benchmarks."""


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
        seams of a step, and step_seconds, the median of the later steps.
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
    values["step_seconds"] = sorted(seconds[2:])[len(seconds[2:]) // 2]
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


def _trained(point: Point, shape: Shape, model: Any, device: torch.device) -> list[float]:
    cell = Cell(point.model, steps=STEPS, num_workers=0, shape=shape)
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
    for _ in range(STEPS):
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


def run(points: Sequence[Point], seconds: float = 3600.0) -> Iterator[dict[str, Any]]:
    """Measure the points one after another, each in a process of its own.

    A failure is a row, and the next point goes on.

    Args:
        points: what is measured.
        seconds: after which no other point is begun.
    """
    end = time.monotonic() + seconds
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


def row_of(point: Point) -> dict[str, Any]:
    """What the estimate says of a point, and what was measured or its error."""
    on_gpu = torch.cuda.is_available()
    gpu = (gpu_named(torch.cuda.get_device_name()) if on_gpu else None) or GPUS["h200"]
    plan = plan_of(point)
    said = {
        "estimated_gib": peak(plan).gib,
        "estimated_tokens_per_second": plan.tokens * plan.accumulation / step_seconds(plan, gpu),
    }
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


def main() -> None:
    """Measure and print one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="points whose name has one of these words")
    parser.add_argument("--output", type=Path, help="append the lines to this file")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no point after these")
    options = parser.parse_args()
    chosen = [p for p in POINTS if not options.only or any(w in p.name for w in options.only)]
    for row in run(chosen, options.seconds):
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()
        if options.output is not None:
            append(options.output, [row])


if __name__ == "__main__":
    main()
