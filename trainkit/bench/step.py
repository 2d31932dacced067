"""Training steps side by side: forward and backward of whole models, one process per cell.

A cell is a model with a provider: Hugging Face on the attention kernel that torch prefers, on flash
attention, on cuDNN's; torch.compile; Liger as Trainer applies it; trainkit. Weights and tokens are
random, made on the device; the loss is normalised by ``num_items_in_batch`` as Trainer does; no
optimizer runs.
"""

from typing import Any

import torch
from torch import nn

from trainkit.bench.cells import Cell
from trainkit.bench.measure import Training, peak_gib
from trainkit.bench.providers import Shape, attention_of, provide

PEAK_FLOPS = 989e12
"""Dense bf16 of an H100 or H200 by the vendor's datasheet."""


def training(cell: Cell, device: torch.device) -> Training:
    """A cell's model with its step: forward and backward."""
    shape, chunk = cell.size, cell.settings.get("loss_chunk_tokens")
    kernels = cell.settings.get("kernels", True)
    provided = provide(cell.provider, shape, device, loss_chunk_tokens=chunk, kernels=kernels)
    generator = torch.Generator(device).manual_seed(1)
    size = (shape.batch_size, shape.length)
    tokens = torch.randint(0, shape.config["vocab_size"], size, generator=generator, device=device)
    num_items = torch.tensor(shape.batch_size * (shape.length - 1), device=device)

    def step() -> torch.Tensor:
        with attention_of(cell.provider):
            loss: torch.Tensor = provided.call(
                input_ids=tokens, labels=tokens, num_items_in_batch=num_items
            ).loss
            loss.backward()
        provided.model.zero_grad(set_to_none=True)
        return loss.detach()

    return Training(provided.model, step, device, cell.steps, cell.warm_up_seconds)


def measure(cell: Cell, device: torch.device) -> dict[str, Any]:
    shape, trained = cell.size, training(cell, device)
    first = trained.step()
    milliseconds = trained.milliseconds()
    num_tokens = shape.batch_size * shape.length
    flops = _flops_per_token(trained.model, shape) * num_tokens
    seconds = milliseconds / 1e3
    return {
        "batch_size": shape.batch_size,
        "length": shape.length,
        "loss_chunk_tokens": cell.settings.get("loss_chunk_tokens"),
        "ms": milliseconds,
        "tokens_per_second": num_tokens / seconds,
        "mfu": flops / seconds / PEAK_FLOPS,
        "peak_memory_gib": peak_gib(device),
        "loss": first.item(),
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
