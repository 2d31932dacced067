"""A full optimizer step through trainkit's Trainer, against the bare forward and backward.

What the Trainer adds, data loading, copies, clipping, the optimizer, metrics, should cost a few per
cent of a step. Run as ``python -m trainkit.bench.through_trainer`` it is the process of one cell.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast, PrinterCallback, TrainingArguments

from trainkit.bench.providers import MODELS, Shape, answer_cell, provide
from trainkit.data.serve.collator import PaddingCollator
from trainkit.objectives import SFT
from trainkit.objectives.batches import CountingCollator, TrainingData
from trainkit.options.optimizers import DEFAULT, OURS, optimizer_row
from trainkit.parallel import STRATEGIES, Layout, ProcessRank
from trainkit.train.checkpoints import CheckpointWriter
from trainkit.train.faults.signals import StopRequest
from trainkit.train.optimizer.make import OptimizerPlan
from trainkit.train.trainer import ObjectiveTrainer


@dataclass(frozen=True)
class Cell:
    """What one process measures.

    Args:
        model: a key of `trainkit.bench.providers.MODELS`.
        steps: optimizer steps; the first half warms up.
        logging_steps: steps between log lines; each line waits for the device once.
        num_workers: of the data loader.
        profile: a file to write the host's and the GPU's time to; empty for none.
        shape: measured instead of the model's own; for tests.
    """

    model: str
    steps: int = 40
    logging_steps: int = 1
    num_workers: int = 2
    profile: str = ""
    shape: Shape | None = None


class _Rows:
    """Full rows of random tokens, in their own order."""

    def __init__(self, count: int, shape: Shape) -> None:
        self._shape = shape
        self.lengths = np.full(count, shape.length)

    def set_epoch(self, epoch: int) -> None:
        """There is one order."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        random = np.random.default_rng(index)
        tokens = random.integers(0, self._shape.config["vocab_size"], self._shape.length)
        mask = np.ones(self._shape.length, dtype=np.uint8)
        return {"input_ids": tokens.astype(np.int32), "loss_mask": mask, "source": 0}


def measure(cell: Cell, device: torch.device) -> dict[str, Any]:
    """Train and read the Trainer's own figures."""
    shape = cell.shape or MODELS[cell.model]
    with tempfile.TemporaryDirectory() as directory:
        model = provide("trainkit", shape, device).model
        trainer = make_trainer(cell, shape, model, device, Path(directory))
        if cell.profile:
            _profiled(trainer, Path(cell.profile))
        else:
            trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    settled = rows[len(rows) // 2 :]
    return {
        "batch_size": shape.batch_size,
        "length": shape.length,
        "logging_steps": cell.logging_steps,
        "ms": 1e3 * float(np.median([row["step_seconds"] for row in settled])),
        "tokens_per_second": float(np.median([row["tokens_per_second"] for row in settled])),
        "data_seconds": float(np.median([row["data_seconds"] for row in settled])),
        "peak_memory_gib": settled[-1].get("peak_memory_gib"),
        "loss": rows[0]["loss"],
    }


def make_trainer(
    cell: Cell,
    shape: Shape,
    model: Any,
    device: torch.device,
    directory: Path,
    *,
    optim: str = DEFAULT,
    optimizer_plan: OptimizerPlan | None = None,
    samples: Any = None,
    **training: Any,
) -> ObjectiveTrainer:
    """The Trainer over rows of random tokens.

    Args:
        cell: how many steps, and how they are logged.
        shape: of the batch.
        model: what is trained.
        device: where it is.
        directory: for what the Trainer writes.
        optim: a name of ``training.optim``.
        optimizer_plan: what ``training`` does not know.
        samples: the rows; None makes random ones.
        training: more of ``TrainingArguments``.
    """
    projects = optimizer_row(optim).per_rank_bytes is not None
    args = TrainingArguments(
        output_dir=str(directory),
        per_device_train_batch_size=shape.batch_size,
        max_steps=cell.steps,
        logging_steps=cell.logging_steps,
        logging_nan_inf_filter=False,
        optim=DEFAULT if optim in OURS else optim,
        optim_target_modules="all-linear" if projects else None,
        dataloader_num_workers=cell.num_workers,
        remove_unused_columns=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=device.type == "cpu",
        **{"learning_rate": 1e-5, **training},
    )
    if optim in OURS:
        args.optim = optim
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_no_tokenizer(), pad_token="<pad>")
    rows = cell.steps * shape.batch_size * args.gradient_accumulation_steps
    trainer = ObjectiveTrainer(
        objective=SFT,
        model=model,
        args=args,
        layout=Layout.of(STRATEGIES["none"], ProcessRank.from_environment()),
        tokenizer=tokenizer,
        train_data=TrainingData(
            samples=samples or _Rows(rows, shape),
            collator=CountingCollator(PaddingCollator(0), lambda rows: len(rows) * shape.length),
            without_training=lambda sample: sample,
        ),
        eval_data=None,
        checkpoints=CheckpointWriter(directory, {"data": "random"}),
        stop=StopRequest(),
        optimizer_plan=optimizer_plan,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _no_tokenizer() -> Any:
    from tokenizers import Tokenizer, models

    return Tokenizer(models.BPE())


def _profiled(trainer: ObjectiveTrainer, path: Path) -> None:
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as recorded:
        trainer.train()
    table = recorded.key_averages()
    by_device = table.table(sort_by="self_cuda_time_total", row_limit=40)
    by_host = table.table(sort_by="self_cpu_time_total", row_limit=30)
    path.write_text(f"{by_device}\n{by_host}\n", encoding="utf-8")


if __name__ == "__main__":
    answer_cell(Cell, measure)
