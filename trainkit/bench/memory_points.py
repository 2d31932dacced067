"""What `trainkit.bench.memory` measures: shapes, points, and what the estimate is asked for."""

from dataclasses import dataclass, replace
from typing import Any

from trainkit.bench import lora
from trainkit.bench.providers import Shape
from trainkit.estimate.plan import Adapters, Plan
from trainkit.estimate.shape import find_shape
from trainkit.estimate.state import optimizer_bytes
from trainkit.options import RecomputeOptions
from trainkit.options.optimizers import optimizer_row

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
    "qwen3-0.6b": _shape("qwen3", 1024, 3072, 28, 16, 8, 151936, tie=True, head_dim=128),
    "qwen3-4b": _shape("qwen3", 2560, 9728, 36, 32, 8, 151936, tie=True, head_dim=128),
    "qwen3-8b": _shape("qwen3", 4096, 12288, 36, 32, 8, 151936, head_dim=128),
    "gemma-2b": _shape("gemma", 2048, 16384, 18, 8, 1, 256000, tie=True, head_dim=256),
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
        optim_args: ``training.optim_args``, for a row's estimate.
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
    optim_args: str | None = None
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
    state: float | None = optimizer_bytes(row, shape, full=is_full, args=point.optim_args)
    if is_full and point.provider != "trainkit":
        state = None
    plan = Plan(
        shape,
        point.batch_size,
        point.length,
        accumulation=point.accumulation,
        base={"qlora": "nf4", "fp8": "fp8"}.get(point.mode, "bfloat16"),
        adapters=None if is_full else Adapters(rank=point.lora_rank, offload=point.offload),
        fp8=1.0 if point.mode in ("full_fp8", "fp8") else None,
        recompute=point.recompute,
        selective=point.selective,
        offload=point.offload,
        trainer=point.provider == "trainkit",
        keeps_masters=point.keeps_masters,
        one_pass=row.one_pass,
        in_backward=point.in_backward,
        flat=point.optim == "flat_adamw",
        optimizer=state,
        slower=row.slower if state is not None else Plan.slower,
        stepping=(row.step_bytes, row.step_largest_bytes),
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
    # A GPU waits for Python here: what a layer's launches take of it.
    Point("llama-3.2-1b", "lora", 1, 256),
    Point("llama-3.2-1b", "qlora", 1, 256),
    Point("llama-3.2-1b", "fp8", 1, 256),
    Point("llama-3.2-1b", "lora", 1, 256, provider="hf"),
    Point("qwen2-0.5b", "lora", 1, 256),
    Point("llama-3.2-1b", "fp8", 1, 256, recompute=1),
    Point("llama-3.2-1b", "qlora", 1, 256, provider="hf", recompute=1),
    Point("llama-3.2-1b", "full", 1, 256),
    Point("llama-3.2-1b", "full_fp8", 1, 256),
    # Families and shapes that no other row has.
    Point("mistral-7b", "lora", 2, lora_rank=64),
    Point("qwen3-0.6b", "full", 4),
    Point("gemma-2b", "lora", 4),
    Point("qwen3-8b", "qlora", 4, recompute=1),
    Point("qwen3-4b", "lora", 4),
    Point("gemma-2b", "full", 2),
    Point("llama-3.2-3b", "full", 2, recompute=1, accumulation=2),
)
"""Sizes from 0.5B to 9B, none of them a row of the other benchmarks."""
