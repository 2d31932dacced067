"""The cells of `parity.py`: what is spread how, over which data, and why some are refused."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

WAYS: dict[str, dict[str, Any]] = {
    **{shard: {"shard": shard} for shard in ("none", "zero1", "zero2", "zero3", "fsdp2")},
    **{
        f"{shard}_sequence": {"shard": shard, "sequence": 2}
        for shard in ("none", "zero1", "zero2", "zero3", "fsdp2")
    },
    "pipeline": {"pipeline": 2},
    "pipeline_interleaved": {"pipeline": 2, "schedule": "interleaved"},
    "pipeline_zbv": {"pipeline": 2, "schedule": "zbv"},
    "fsdp2_pipeline": {"shard": "fsdp2", "pipeline": 2},
    "fsdp2_pipeline_interleaved": {"shard": "fsdp2", "pipeline": 2, "schedule": "interleaved"},
    "zero1_tensor": {"shard": "zero1", "tensor": 2},
    "zero1_tensor_sequence": {"shard": "zero1", "tensor": 2, "sequence": 2},
}
"""What ``parallel`` says, by name."""

KINDS = {"full": {}, "lora": {"r": 4}, "nf4": {"r": 4, "quantize": "nf4"}}
STEPS = 20


@dataclass(frozen=True)
class Cell:
    """One run."""

    way: str
    kind: str
    kernels: bool
    packed: bool
    checkpointed: bool
    ranks: int
    rows: int = 1

    @property
    def name(self) -> str:
        """Of its folder."""
        marks = [f"k{int(self.kernels)}", f"p{int(self.packed)}", f"c{int(self.checkpointed)}"]
        rows = [] if self.rows == 1 else [f"b{self.rows}"]
        return "-".join([self.way, self.kind, *marks, f"x{self.ranks}", *rows])

    @property
    def reference(self) -> Cell:
        """The run it must equal: one process, the plain model, nothing recomputed."""
        return Cell(
            "none", self.kind, kernels=False, packed=self.packed, checkpointed=False, ranks=1
        )

    @property
    def likes(self) -> tuple[Cell, ...]:
        """Runs of one process that equal the reference but for rounding."""
        ways = [(False, 2), (False, 4), (True, 1), (True, 4)]
        return tuple(replace(self.reference, kernels=on, rows=rows) for on, rows in ways)


SWITCHES = {
    "once": [(True, True, True)],
    "quick": [(True, True, True), (False, False, False)],
    # With "once", any two of the three have met in each of their four ways.
    "pairs": [(True, False, False), (False, True, False), (False, False, True)],
    "all": list(itertools.product((True, False), repeat=3)),
}
"""Kernels, packed, checkpointed; by name."""


def cells(ranks: int, only: str, switches: list[tuple[bool, bool, bool]]) -> list[Cell]:
    """The table: every strategy with every kind, and with the switches.

    Args:
        ranks: that each is spread over.
        only: parts of names, with commas; cells come in the order of these parts.
        switches: kernels, packed, checkpointed.
    """
    found = list(_fitting(ranks, switches))
    chosen = [cell for part in only.split(",") for cell in found if part in cell.name]
    return list(dict.fromkeys(chosen))


def _fitting(ranks: int, switches: list[tuple[bool, bool, bool]]) -> Iterator[Cell]:
    for way, kind, (kernels, packed, checkpointed) in itertools.product(WAYS, KINDS, switches):
        if ranks % math.prod(n for n in WAYS[way].values() if isinstance(n, int)):
            continue
        yield Cell(way, kind, kernels, packed, checkpointed, ranks)


def prepare(root: Path) -> None:
    """A model of three layers with a tied head, and rows that nothing is alike in."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    from trainkit.quickstart import chatml_tokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = chatml_tokenizer(core)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(config).save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    chance = random.Random(0)
    with (root / "rows.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(400):
            texts = ["".join(chance.choices("abcdefgh ", k=chance.randint(1, 60))) for _ in "qa"]
            roles = ("user", "assistant")
            messages = [{"role": r, "content": f"x{t}"} for r, t in zip(roles, texts, strict=True)]
            file.write(json.dumps({"messages": messages}) + "\n")


def recipe(cell: Cell, *, bf16: bool) -> dict[str, Any]:
    """What a user would write."""
    return {
        "model": {"name_or_path": "model", "dtype": "bfloat16" if bf16 else "float32"},
        "data": {
            "train": ["rows.jsonl"],
            "max_length": 192,
            "packing": cell.packed,
            "cache_dir": "cache",
            "num_workers": 1,
        },
        "lora": KINDS[cell.kind] or None,
        "kernels": cell.kernels,
        "parallel": WAYS[cell.way],
        "global_batch_size": 8,
        "training": {
            "per_device_train_batch_size": cell.rows,
            "learning_rate": 1e-3,
            "max_steps": STEPS,
            "logging_steps": 1,
            "save_steps": STEPS // 2,
            "save_total_limit": 5,
            "max_grad_norm": 0.5,
            "gradient_checkpointing": cell.checkpointed,
            "seed": 1,
        },
    }


def refused(cell: Cell, *, bf16: bool) -> str | None:
    """Why the table refuses a cell."""
    from trainkit.errors import RecipeError
    from trainkit.recipe import Recipe

    try:
        Recipe(**recipe(cell, bf16=bf16))
    except RecipeError as error:
        return error.what
    return None
