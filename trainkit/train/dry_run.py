"""One forward and backward on the longest batch, so that a run does not fail at hour nine."""

import math
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from transformers import TrainingArguments

from trainkit.errors import TrainkitError
from trainkit.train.data import RunData
from trainkit.train.sampling import take_counts
from trainkit.train.trainer import TrainingData


@dataclass(frozen=True)
class DryRunVerdict:
    """What one step on the longest batch cost.

    Attributes:
        num_tokens: in the batch, padding left out.
        num_trained_tokens: labels in it.
        loss: mean over them.
        seconds: for forward and backward, kernels already compiled.
        peak_memory_gib: of the GPU; None on a CPU. The optimizer's states come on top.
    """

    num_tokens: int
    num_trained_tokens: int
    loss: float
    seconds: float
    peak_memory_gib: float | None


def run_longest_batch(
    model: nn.Module,
    data: TrainingData,
    *,
    batch_size: int,
    device: torch.device,
    autocast_dtype: torch.dtype | None,
) -> DryRunVerdict:
    """Train one step on the ``batch_size`` longest samples, without an optimizer.

    Args:
        model: as it will be trained.
        data: the prepared training data.
        batch_size: samples (or packs) per micro-batch.
        device: where to run.
        autocast_dtype: what training computes in, where that is not the weights' dtype.

    Raises:
        TrainkitError: out of memory (naming the sizes), or the loss or a gradient is no number.
    """
    lengths = data.samples.lengths
    longest = np.argsort(-lengths, kind="stable")[:batch_size]
    model.to(device)
    model.train()
    is_cuda = device.type == "cuda"
    counts: dict[str, int] = {}
    loss, seconds = float("nan"), 0.0
    try:
        for _ in range(2):  # the first one compiles kernels
            batch = data.collator([data.samples[int(index)] for index in longest])
            counts = dict(take_counts(batch))
            batch.pop("source_ids", None)  # for the log of a run, not for the model
            inputs = {
                name: value.to(device) if isinstance(value, torch.Tensor) else value
                for name, value in batch.items()
            }
            model.zero_grad(set_to_none=True)
            if is_cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            started = time.perf_counter()
            num_items = torch.tensor(counts["num_trained_tokens"], device=device)
            with torch.autocast(device.type, autocast_dtype, enabled=autocast_dtype is not None):
                output = model(**inputs, num_items_in_batch=num_items)
            output["loss"].backward()
            loss = output["loss"].item()
            seconds = time.perf_counter() - started
    except torch.OutOfMemoryError as error:
        raise TrainkitError(
            f"out of memory on the longest batch: {batch_size} x up to "
            f"{int(lengths[longest].max())} tokens",
            where="training.per_device_train_batch_size",
            fix="halve it (global_batch_size keeps the step the same), lower data.max_length, or "
            "set training.gradient_checkpointing: true",
        ) from error
    bad = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not torch.isfinite(parameter.grad).all()
    ]
    if not np.isfinite(loss) or bad:
        raise TrainkitError(
            f"the loss is {loss} and {len(bad)} gradients are not finite"
            + (f", the first {bad[0]}" if bad else ""),
            fix="try kernels: false and model.dtype: float32 to find the operation",
        )
    model.zero_grad(set_to_none=True)
    peak = torch.cuda.max_memory_allocated() / 2**30 if is_cuda else None
    return DryRunVerdict(
        num_tokens=counts["num_tokens"],
        num_trained_tokens=counts["num_trained_tokens"],
        loss=loss,
        seconds=seconds,
        peak_memory_gib=peak,
    )


def describe_dry_run(
    verdict: DryRunVerdict, data: RunData, args: TrainingArguments
) -> dict[str, object]:
    """Label to value, for the console."""
    rows = len(data.train.samples)
    micro = args.per_device_train_batch_size * args.world_size
    per_step = micro * args.gradient_accumulation_steps
    steps = -(-rows // per_step)
    total = args.max_steps if args.max_steps > 0 else math.ceil(steps * args.num_train_epochs)
    memory = (
        {} if verdict.peak_memory_gib is None else {"peak": f"{verdict.peak_memory_gib:.1f} GiB"}
    )
    return {
        "longest batch": f"{verdict.num_tokens} tokens, {verdict.num_trained_tokens} trained",
        "loss": f"{verdict.loss:.4f}",
        "forward+backward": f"{verdict.seconds:.2f} s",
        **memory,
        "rows": f"{rows}, {per_step} a step" if data.train.stream is None else "streamed",
        "steps": f"{total} ({steps} an epoch)" if data.train.stream is None else f"{total}",
    }
