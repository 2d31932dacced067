"""Is the curve the same? A few hundred optimizer steps, patched against plain, batch for batch.

Plain runs that differ only in SDPA's kernel (cuDNN's, the memory-efficient one, plain arithmetic)
show how far rounding alone drives two curves apart; trainkit's distance to the first must stay
within that. All runs start from the same random weights, see the same batches, and keep fp32 master
weights. Nothing is timed, so they run at once.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainkit.bench.cells import Cell
from trainkit.bench.providers import attention_of, provide
from trainkit.data.collator import PaddingCollator
from trainkit.train.masters import MasterWeightOptimizer

RUNS = ("hf_cudnn", "hf_efficient", "hf_math", "trainkit")
_LEARNING_RATE, _WARM_UP_STEPS = 2e-4, 20


def distances(losses: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """How far the curves of `RUNS` lie from the first.

    Returns:
        Per run, ``mean_difference`` and ``max_difference`` of the loss over all steps.

    Raises:
        ValueError: two plain curves are identical, so they ran the same attention kernel and say
            nothing about what rounding does.
    """
    base = np.array(losses[RUNS[0]])
    found = {}
    for name in RUNS[1:]:
        gaps = np.abs(np.array(losses[name]) - base)
        found[name] = {"mean_difference": float(gaps.mean()), "max_difference": float(gaps.max())}
        if name != "trainkit" and not gaps.any():
            raise ValueError(f"{name} is identical to {RUNS[0]}: their kernels did not differ")
    return found


def measure(cell: Cell, device: torch.device) -> dict[str, list[float]]:
    """The loss of every step."""
    settings = cell.settings
    provided = provide(cell.provider, cell.size, device)

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=_LEARNING_RATE, fused=device.type == "cuda")

    optimizer = MasterWeightOptimizer([{"params": list(provided.model.parameters())}], make)
    samples = _read(Path(settings["samples"]), settings["max_length"])
    order = np.random.default_rng(0)
    collate = PaddingCollator(0, pad_to_multiple_of=64)
    losses = []
    with attention_of(cell.provider):
        for step in range(cell.steps):
            chosen = order.choice(len(samples), settings["batch_size"], replace=False)
            batch = collate([samples[index] for index in chosen])
            num_items = int((batch["labels"][:, 1:] != -100).sum())
            inputs = {name: value.to(device) for name, value in batch.items()}
            loss = provided.call(**inputs, num_items_in_batch=num_items).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(provided.model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = _LEARNING_RATE * min(1.0, (step + 1) / _WARM_UP_STEPS)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return {"losses": torch.stack(losses).tolist()}


def _read(path: Path, max_length: int) -> list[dict[str, Any]]:
    samples = []
    for line in filter(None, path.read_text(encoding="utf-8").split("\n")):
        row = json.loads(line)
        ids = np.array(row["input_ids"][:max_length], dtype=np.int32)
        mask = (np.array(row["labels"][:max_length]) != -100).astype(np.uint8)
        if mask[1:].any():
            samples.append({"input_ids": ids, "loss_mask": mask, "source": 0})
    return samples
