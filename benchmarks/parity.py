"""Walks the ways of spreading a run, and holds each against one process that spreads nothing.

    python -m benchmarks parity --ranks 2 --output rows.jsonl [--only fsdp2] [--bf16] [--resume]

Every cell is ``trainkit sft`` on a tiny model: rows of uneven length with uneven masks, several
micro-batches a step, clipping. In fp32 the first gradient norm may differ by 1e-6 of itself and
each loss by 1e-5. With ``--bf16`` runs of one process differ, too, that should not: with rows
taken one, two or four at a time, with kernels and without. Twice their largest difference is what
a cell may differ by. Cells that the table of refusals names are recorded with their reason.
One JSON row a cell, a table last; the exit status is 1 if a cell is off. ``--table`` prints the
guide's table of the rows in docs/benchmarks.

``--models unlisted`` walks types of other structure than Llama's, compiled and recomputed, too: an
fp32 run may differ by 1e-5, or by twice what plain runs of one process differ.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.forked_runs import Runs, visible_gpus

ROWS = Path(__file__).resolve().parents[1] / "docs/benchmarks/parity.jsonl"
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

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {"head_dim": 32, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "olmo2": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "granite": {
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.4,
        "logits_scaling": 4.0,
    },
    "cohere2": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "qwen3_moe": {"head_dim": 32, "num_experts": 4, "moe_intermediate_size": 64},
    "gpt_neox": {"rotary_pct": 0.25},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 64,
    },
    "gpt_oss": {"head_dim": 32, "num_local_experts": 4},
}
"""What each type has besides sizes: Llama, and ten that nothing here names elsewhere."""

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "sliding_window": 24,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

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
    model: str = "llama"
    compiled: bool = False

    @property
    def name(self) -> str:
        """Of its folder."""
        marks = [f"k{int(self.kernels)}", f"p{int(self.packed)}", f"c{int(self.checkpointed)}"]
        rows = [] if self.rows == 1 else [f"b{self.rows}"]
        model = [] if self.model == "llama" else [self.model]
        more = [*rows, *(["compiled"] if self.compiled else [])]
        return "-".join([*model, self.way, self.kind, *marks, f"x{self.ranks}", *more])

    @property
    def reference(self) -> Cell:
        """The run it must equal: one process, the plain model, nothing recomputed."""
        plain = {"kernels": False, "checkpointed": False, "compiled": False}
        return replace(self, way="none", ranks=1, rows=1, **plain)

    @property
    def likes(self) -> tuple[Cell, ...]:
        """Runs of one process that equal the reference but for rounding."""
        ways = [(False, 2), (False, 4), (True, 1), (True, 4)]
        if self.model != "llama":  # rounding of plain runs alone
            ways = ways[:1]
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
    return select(_fitting(ranks, switches), only)


def select(found: Iterable[Cell], only: str) -> list[Cell]:
    """Those with any of these parts of names, in their order."""
    table = list(found)
    return list(dict.fromkeys(c for part in only.split(",") for c in table if part in c.name))


def _fitting(ranks: int, switches: list[tuple[bool, bool, bool]]) -> Iterator[Cell]:
    for way, kind, (kernels, packed, checkpointed) in itertools.product(WAYS, KINDS, switches):
        if ranks % math.prod(n for n in WAYS[way].values() if isinstance(n, int)):
            continue
        yield Cell(way, kind, kernels, packed, checkpointed, ranks)


def unlisted() -> Iterator[Cell]:
    """Every type but Llama in each way of spreading it, and in one process compiled, recomputed."""
    ways = ("none", "zero2", "zero3", "fsdp2", "pipeline", "zero1_tensor")
    for model in [each for each in MODELS if each != "llama"]:
        plain = Cell("none", "full", True, packed=True, checkpointed=False, ranks=1, model=model)
        yield replace(plain, compiled=True)
        yield replace(plain, checkpointed=True)
        yield from (replace(plain, way=way, ranks=2) for way in ways)


def prepare(root: Path) -> None:
    """Models of four layers with a tied head, and rows that nothing is alike in."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM

    from trainkit.quickstart import chatml_tokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = chatml_tokenizer(core)
    for model, more in MODELS.items():
        sizes = {**SIZES, "vocab_size": len(tokenizer), **more}
        config = AutoConfig.for_model(model, **sizes)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(root / model)
        tokenizer.save_pretrained(root / model)
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
        "model": {"name_or_path": cell.model, "dtype": "bfloat16" if bf16 else "float32"},
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
            "max_steps": STEPS if cell.model == "llama" else 5,
            "logging_steps": 1,
            "save_steps": STEPS // 2,
            "save_total_limit": 5,
            "max_grad_norm": 0.5,
            "gradient_checkpointing": cell.checkpointed,
            "torch_compile_backend": "aot_eager" if cell.compiled else None,
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


def numbers(folder: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["loss"], row["grad_norm"]) for row in rows if "loss" in row]


def differences(wanted: Path, found: Path) -> dict[str, float]:
    """Largest of the losses, of the first gradient norm, and of all norms."""
    pairs = list(zip(numbers(wanted), numbers(found), strict=True))
    norms = [abs(a[1] - b[1]) / a[1] for a, b in pairs]
    return {
        "loss_difference": max(abs(a[0] - b[0]) for a, b in pairs),
        "first_norm_difference": norms[0],
        "norm_difference": max(norms),
    }


def limits(cell: Cell, runs: Runs, *, bf16: bool) -> dict[str, float]:
    """What a cell may differ by."""
    least = {} if bf16 else {"loss_limit": 1e-5, "first_norm_limit": 1e-6}
    if not bf16 and cell.model == "llama":
        return least
    alike = [cell.reference, *cell.likes]
    folders = [runs.root / each.name for each in alike if runs.went[each.name]]
    if len(folders) < len(alike):
        names = [each.name for each in alike if not runs.went[each.name]]
        raise RuntimeError(f"{names[0]}: {runs.said(names[0])}")
    noise = [differences(a, b) for a, b in itertools.combinations(folders, 2)]
    return {
        f"{what}_limit": max(
            least.get(f"{what}_limit", 0.0), 2 * max(each[f"{what}_difference"] for each in noise)
        )
        for what in ("loss", "first_norm")
    }


_REFUSAL = re.compile(r"error: (rank \d+: )?parallel\.\w+: ")
"""What depends on the model is refused where the run begins."""


def judged(cell: Cell, runs: Runs, *, bf16: bool) -> dict[str, Any]:
    """A cell that has run against its reference."""
    for each in (cell.reference, cell):
        if not runs.went[each.name]:
            said = runs.said(each.name)
            return {"refused" if _REFUSAL.search(said) else "failed": said}
    try:
        found = numbers(runs.root / cell.name)
        row = differences(runs.root / cell.reference.name, runs.root / cell.name)
        row |= limits(cell, runs, bf16=bf16)
    except (RuntimeError, ValueError, LookupError, OSError, ArithmeticError) as error:
        return {"failed": f"{type(error).__name__}: {error}"}
    is_near = all(
        row[f"{what}_difference"] <= row[f"{what}_limit"] for what in ("loss", "first_norm")
    )
    return {**row, "loss": [found[0][0], found[-1][0]], "ok": is_near}


def measure(chosen: argparse.Namespace, runs: Runs) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Every cell with what came of it; each run begins after those that it is held against."""
    bf16, wanted = chosen.bf16, list[Cell]()
    table = cells(chosen.ranks, chosen.only, SWITCHES[chosen.switches])
    if chosen.models == "unlisted":
        table = select(unlisted(), chosen.only)
    for cell in table:
        if reason := refused(cell, bf16=bf16):
            yield cell, {"refused": reason}
        else:
            wanted.append(cell)
    needs = {
        cell: (cell.reference, *(cell.likes if bf16 or cell.model != "llama" else ()), cell)
        for cell in wanted
    }

    def begin(cell: Cell) -> tuple[str, list[str], int]:
        path = runs.root / f"{cell.name}.json"
        path.write_text(json.dumps(recipe(cell, bf16=bf16)), encoding="utf-8")
        words = ["sft", "--config", path.name, "--output-dir", cell.name]
        return cell.name, words, cell.ranks

    queue = dict.fromkeys(each for cell in wanted for each in needs[cell])
    for _ in runs.all(map(begin, queue)):
        for cell in [c for c in needs if all(each.name in runs.went for each in needs[c])]:
            del needs[cell]
            row = judged(cell, runs, bf16=bf16)
            if chosen.resume and runs.went[cell.name]:
                row |= _resumed(cell, runs)
                row["ok"] = row.get("ok", False) and row["resumed_exactly"]
            yield cell, row
    for cell in needs:
        yield cell, {"not_run": "the time was over"}


def _resumed(cell: Cell, runs: Runs) -> dict[str, Any]:
    """A copy of a run that went on from its middle."""
    again = f"{cell.name}-again"
    shutil.copytree(runs.root / cell.name, runs.root / again)
    words = ["sft", "--resume", f"{again}/checkpoint-{STEPS // 2}"]
    for _ in runs.all([(again, words, cell.ranks)]):
        pass
    if not runs.went[again]:
        return {"resumed_exactly": False, "failed": runs.said(again)}
    return {"resumed_exactly": numbers(runs.root / again) == numbers(runs.root / cell.name)}


def state(found: dict[str, Any]) -> str:
    """Of a cell, in a word."""
    for word in ("refused", "not_run", "failed"):
        if word in found:
            return word
    return "ok" if found["ok"] else "OFF"


def table(outcomes: dict[str, dict[str, Any]]) -> str:
    """A line for each cell that ran, and how many came to what."""
    lines, count = ["", "cell: loss off by / limit; first norm off by / limit"], Counter[str]()
    for name, found in outcomes.items():
        count[state(found)] += 1
        figures = (
            f"{found[f'{what}_difference']:.1e} / {found[f'{what}_limit']:.1e}"
            for what in ("loss", "first_norm")
            if f"{what}_limit" in found
        )
        told = found.get("failed", "")[:200]
        if state(found) != "refused":
            lines.append(f"{state(found):8}{name}: {'; '.join(figures)}{told}")
    counted = ", ".join(f"{number} {word}" for word, number in count.items())
    return "\n".join([*lines, counted]) + "\n"


def guide_table() -> str:
    """A line for each way; in how many of the eight settings of the three switches it ran."""
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    assert all(row["ok"] for row in rows), "a cell is off"
    lines = ["| parallel | full | LoRA | nf4 |", "|---|---|---|---|"]
    for way, spread in WAYS.items():
        named = ", ".join(
            str(v) if k in ("shard", "schedule") else f"{k} {v}" for k, v in spread.items()
        )
        cells = []
        for kind in KINDS:
            mine = [row for row in rows if (row["way"], row["kind"]) == (way, kind)]
            if refused(
                Cell(way, kind, kernels=True, packed=True, checkpointed=True, ranks=8), bf16=False
            ):
                cells.append("refused")
                continue
            parts = []
            for ranks in (2, 4):
                of_ranks = [
                    row for row in mine if row["ranks"] == ranks and row["dtype"] == "float32"
                ]
                settings = {
                    (row["kernels"], row["packed"], row["checkpointed"]) for row in of_ranks
                }
                parts += [f"{len(settings)} on {ranks} ranks"] if settings else []
            cells.append(", ".join(parts))
        lines.append(f"| {named} | {' | '.join(cells)} |".replace("|  |", "| |"))
    return "\n".join(lines)


def main(words: list[str]) -> None:
    """Walk the table."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks parity", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--output", type=Path, default="parity.jsonl", help="of rows")
    parser.add_argument("--table", action="store_true", help="print the guide's table, no more")
    parser.add_argument("--only", default="", help="parts of names, with commas, in this order")
    parser.add_argument("--switches", choices=SWITCHES, default="all")
    parser.add_argument("--models", choices=("llama", "unlisted"), default="llama")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--resume", action="store_true", help="go on from the middle, too")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--timeout-seconds", type=float, default=1200.0, help="of each run")
    parser.add_argument("--deadline-seconds", type=float, default=math.inf, help="of all")
    chosen = parser.parse_args(words)
    if chosen.table:
        sys.stdout.write(guide_table() + "\n")
        return
    deadline = time.monotonic() + chosen.deadline_seconds
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking CUDA would forbid to fork
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    import trainkit.cli.commands.sft
    import trainkit.train.build  # noqa: F401

    outcomes: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        prepare(Path(scratch))
        runs = Runs(Path(scratch), chosen.jobs, chosen.timeout_seconds, deadline)
        about = {"dtype": "bfloat16" if chosen.bf16 else "float32"}
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        for cell, found in measure(chosen, runs):
            told = {name: value for name, value in vars(cell).items() if name != "rows"}
            row = {**told, **about, **found, **versions, "on_gpus": bool(visible_gpus())}
            with chosen.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            outcomes[cell.name] = found
            sys.stdout.write(f"{cell.name} {json.dumps(found)}\n")
            sys.stdout.flush()
    sys.stdout.write(table(outcomes))
    sys.exit(any(state(found) not in ("ok", "refused") for found in outcomes.values()))
