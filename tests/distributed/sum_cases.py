"""bf16 weights and several micro-batches a step, on ranks and in one process."""

from pathlib import Path

from lab import Lab
from tiny import make_tokenizer


def train(root, batch, accumulate):
    """Losses and gradient norms of each step."""
    lab = Lab(make_tokenizer(), Path(root))
    options = {"batch": batch, "accumulate": accumulate, "max_steps": 3, "save_strategy": "no"}
    trainer = lab.trainer("run", dtype="bfloat16", learning_rate=0.0, **options)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return [[row["loss"], row["grad_norm"]] for row in rows]
