"""Training steps side by side: forward and backward of whole models, one process per cell.

A cell is a model with a provider: Hugging Face on SDPA (flash attention), the same on cuDNN's
attention, torch.compile, Liger as Trainer applies it, trainkit. Weights and tokens are random, made
on the device; the loss is normalised by ``num_items_in_batch`` as Trainer does; no optimizer runs.

The processes import everything at once and then wait for their turn, so that the GPU is not idle
while Python starts. Run as ``python -m trainkit.bench.step`` it is the process of one cell.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from trainkit.bench.clock import peak_gib, timed

PEAK_FLOPS = 989e12
"""Dense bf16 of an H100 or H200 by the vendor's datasheet."""


@dataclass(frozen=True)
class Shape:
    """A model's shape with the batch it is measured on.

    Args:
        family: ``model_type``.
        config: the arguments of its configuration.
        batch_size: sequences in a step.
        length: tokens in a sequence.
    """

    family: str
    config: dict[str, Any]
    batch_size: int
    length: int


MODELS: dict[str, Shape] = {
    "qwen2-0.5b": Shape(
        "qwen2",
        {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
            "max_position_embeddings": 32768,
        },
        16,
        2048,
    ),
    "llama-3.2-1b": Shape(
        "llama",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 128256,
            "tie_word_embeddings": True,
            "max_position_embeddings": 131072,
        },
        16,
        2048,
    ),
    "qwen2-7b": Shape(
        "qwen2",
        {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
            "tie_word_embeddings": False,
            "max_position_embeddings": 32768,
        },
        4,
        2048,
    ),
}

PROVIDERS = ("hf_sdpa", "hf_cudnn", "torch_compile", "liger", "trainkit")


@dataclass(frozen=True)
class Cell:
    """What one process measures.

    Args:
        model: a key of `MODELS`.
        provider: one of `PROVIDERS`.
        loss_chunk_tokens: of trainkit's loss; None is its default.
        optimizer: also run a fused AdamW step on bf16 weights.
        warmups: steps before the clock runs.
        steps: steps on the clock.
        shape: measured instead of the model's own; for tests.
    """

    model: str
    provider: str
    loss_chunk_tokens: int | None = None
    optimizer: bool = False
    warmups: int = 4
    steps: int = 10
    shape: Shape | None = None

    def shape_to_measure(self) -> Shape:
        """The shape this cell runs."""
        return self.shape or MODELS[self.model]


def run(cells: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    """Measure cells one after another, each in a process of its own.

    Yields:
        Per cell its fields with ms, tokens_per_second, mfu, peak_memory_gib, loss and provider
        versions, or ``error`` with the end of what the process said.
    """
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "trainkit.bench.step"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in cells
    ]
    try:
        for cell, process in zip(cells, processes, strict=True):
            output, errors = process.communicate(json.dumps(asdict(cell)) + "\n")
            name = {"model": cell.model, "provider": cell.provider}
            if process.returncode:
                yield {**name, "error": errors.strip()[-2000:]}
            else:
                yield {**name, **json.loads(output.strip().splitlines()[-1])}
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()


def build(shape: Shape, device: torch.device, implementation: str) -> nn.Module:
    """The model in bf16 with random weights, in training mode, without a key/value cache."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(shape.family, **shape.config, use_cache=False)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=implementation
        )
    return model.train()


def _trainkit(cell: Cell, device: torch.device) -> tuple[nn.Module, Callable[..., Any]]:
    import trainkit
    from trainkit.models import attention, loss_head

    shape = cell.shape_to_measure()
    chosen = attention.resolve_attention(shape.family, packed=False, device=device)
    model = build(shape, device, chosen.name)
    attention.install(model, chosen.engine)
    trainkit.patch(model)
    loss_head.configure(model, loss_head.LossOptions(chunk_tokens=cell.loss_chunk_tokens))
    return model, model


def _liger(cell: Cell, device: torch.device) -> tuple[nn.Module, Callable[..., Any]]:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    model = build(cell.shape_to_measure(), device, "sdpa")
    _apply_liger_kernel_to_instance(model)
    return model, model


def _compiled(cell: Cell, device: torch.device) -> tuple[nn.Module, Callable[..., Any]]:
    model = build(cell.shape_to_measure(), device, "sdpa")
    return model, torch.compile(model)


def _plain(cell: Cell, device: torch.device) -> tuple[nn.Module, Callable[..., Any]]:
    model = build(cell.shape_to_measure(), device, "sdpa")
    return model, model


def _cudnn_first() -> AbstractContextManager[Any]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)


_BUILDERS = {
    "hf_sdpa": _plain,
    "hf_cudnn": _plain,
    "torch_compile": _compiled,
    "liger": _liger,
    "trainkit": _trainkit,
}


def measure(cell: Cell, device: torch.device) -> dict[str, Any]:
    """Build a cell's model and time its steps on ``device``."""
    shape = cell.shape_to_measure()
    model, step_model = _BUILDERS[cell.provider](cell, device)
    optimizer = None
    if cell.optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")
    generator = torch.Generator(device).manual_seed(1)
    size = (shape.batch_size, shape.length)
    tokens = torch.randint(0, shape.config["vocab_size"], size, generator=generator, device=device)
    num_items = torch.tensor(shape.batch_size * (shape.length - 1), device=device)

    def step() -> torch.Tensor:
        loss = step_model(input_ids=tokens, labels=tokens, num_items_in_batch=num_items).loss
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        return loss.detach()

    context = _cudnn_first() if cell.provider == "hf_cudnn" else nullcontext()
    with context:
        for _ in range(cell.warmups):
            first = step()
        milliseconds, loss = timed(step, cell.steps, device)
    num_tokens = shape.batch_size * shape.length
    flops = _flops_per_token(model, shape) * num_tokens
    seconds = milliseconds / 1e3
    return {
        "batch_size": shape.batch_size,
        "length": shape.length,
        "optimizer": cell.optimizer,
        "loss_chunk_tokens": cell.loss_chunk_tokens,
        "ms": milliseconds,
        "tokens_per_second": num_tokens / seconds,
        "mfu": flops / seconds / PEAK_FLOPS,
        "peak_memory_gib": peak_gib(device),
        "loss": (first if optimizer is None else loss).item(),
    }


def _flops_per_token(model: nn.Module, shape: Shape) -> float:
    """6 for every weight that multiplies (not the embedding's look-up), plus causal attention."""
    sizes = shape.config
    parameters = sum(p.numel() for p in model.parameters())
    if not sizes["tie_word_embeddings"]:
        parameters -= sizes["vocab_size"] * sizes["hidden_size"]
    default_head = sizes["hidden_size"] // sizes["num_attention_heads"]
    width = sizes["num_attention_heads"] * sizes.get("head_dim", default_head)
    return 6.0 * parameters + 6.0 * sizes["num_hidden_layers"] * width * shape.length


def main() -> None:
    """Read one cell from stdin, measure it, write one JSON line."""
    import transformers  # noqa: F401  (imported while other cells have the GPU)

    values = json.loads(sys.stdin.readline())
    shape = values.pop("shape")
    cell = Cell(**values)
    if shape is not None:
        cell = replace(cell, shape=Shape(**shape))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sys.stdout.write(json.dumps(measure(cell, device)) + "\n")


if __name__ == "__main__":
    main()
