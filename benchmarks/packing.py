"""What packing is worth: trained tokens per second on conversations of very different lengths.

Lengths follow a lognormal distribution whose mean is a sixth of the longest sequence, as chat data
does; of each conversation the last 60% of the tokens are trained. A cell is a provider with a
layout: every row padded to the longest sequence (``max``), to the longest of its batch (``batch``),
or several conversations packed into rows (``packed``).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from trainkit.bench.cells import Cell
from trainkit.bench.measure import peak_gib, timed, warm_up
from trainkit.bench.providers import Provided, Shape, attention_of, provide
from trainkit.data.collator import PackingCollator, PaddingCollator
from trainkit.data.datasets import pack

LAYOUTS = ("max", "batch", "packed")
TRAINED_SHARE = 0.6
_SIGMA = 1.0


def conversations(count: int, max_length: int, vocab_size: int) -> list[dict[str, Any]]:
    """Random samples as the data package prepares them."""
    random = np.random.default_rng(0)
    center = np.log(max_length / 6) - _SIGMA**2 / 2
    lengths = np.clip(random.lognormal(center, _SIGMA, count).astype(int), 8, max_length)
    samples = []
    for length in lengths:
        mask = np.zeros(length, dtype=np.uint8)
        mask[int(length * (1 - TRAINED_SHARE)) :] = 1
        tokens = random.integers(0, vocab_size, length).astype(np.int32)
        samples.append({"input_ids": tokens, "loss_mask": mask, "source": 0})
    return samples


def batches(cell: Cell, shape: Shape) -> list[dict[str, Any]]:
    """The batches of a layout, on the host."""
    rows_needed = cell.steps * shape.batch_size
    vocab_size = shape.config["vocab_size"]
    collate: Callable[[Any], dict[str, Any]]
    if cell.mode == "packed":
        samples = conversations(rows_needed * 8, shape.length, vocab_size)
        lengths = np.array([len(sample["input_ids"]) for sample in samples])
        packs = pack(lengths, shape.length, seed=0, epoch=0)[:rows_needed]
        rows: list[Any] = [[samples[index] for index in indices] for indices in packs]
        collate = PackingCollator(shape.length, 0)
    else:
        rows = conversations(rows_needed, shape.length, vocab_size)
        pad_to = shape.length if cell.mode == "max" else None
        collate = PaddingCollator(0, pad_to=pad_to, pad_to_multiple_of=8)
    size = shape.batch_size
    return [collate(rows[start : start + size]) for start in range(0, rows_needed, size)]


def measure(cell: Cell, device: torch.device) -> dict[str, Any]:
    """Time all batches of a cell on ``device``."""
    shape = cell.size
    provided = provide(cell.provider, shape, device, packed=cell.mode == "packed")
    on_host = batches(cell, shape)
    trained = [int((batch["labels"][:, 1:] != -100).sum()) for batch in on_host]
    real = [_num_tokens(batch) for batch in on_host]
    on_device = [
        {
            **{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()},
            "num_items_in_batch": torch.tensor(count, device=device),
            **({"num_trained_tokens": count} if cell.provider == "trainkit" else {}),
        }
        for batch, count in zip(on_host, trained, strict=True)
    ]

    def epoch() -> torch.Tensor:
        losses = [_step(provided, batch) for batch in on_device]
        return torch.stack(losses).mean()

    with attention_of(cell.provider):
        loss = epoch()
        warm_up(epoch, seconds=cell.warm_up_seconds)
        milliseconds, _ = timed(epoch, 3, device)
    positions = sum(batch["input_ids"].numel() for batch in on_host)
    return {
        "tokens_per_second": 1e3 * sum(real) / milliseconds,
        "trained_tokens_per_second": 1e3 * sum(trained) / milliseconds,
        "padding": 1 - sum(real) / positions,
        "peak_memory_gib": peak_gib(device),
        "loss": loss.item(),
    }


def _step(provided: Provided, batch: dict[str, Any]) -> torch.Tensor:
    loss = provided.call(**batch).loss
    loss.backward()
    provided.model.zero_grad(set_to_none=True)
    return loss.detach()


def _num_tokens(batch: dict[str, Any]) -> int:
    """Tokens that are not padding."""
    if "attention_mask" in batch:
        return int(batch["attention_mask"].sum())
    bounds = batch["cu_seq_lens_q"]
    spans = zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    labels = batch["labels"].flatten()
    # A tail is the one segment in which nothing is trained.
    return sum(stop - start for start, stop in spans if bool((labels[start:stop] != -100).any()))
