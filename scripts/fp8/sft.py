#!/usr/bin/env python3
"""`trainkit sft` from its recipe: adapters on a 7B in packed rows, over a base in bf16 and in fp8.

usage: sft.py OUTPUT [--folder /tmp/fp8_sft] [--steps 12] [--seconds 85]

Both runs read the same documents, a third of whose tokens are not trained on, from the same random
weights; random weights have no budget, so every product that gains is in fp8, the output layer
too. What counts is trained tokens a second over the second half of the steps, with all that a run
does: reading and packing rows, the optimizer, logs. Both import at the start, and take turns.
A JSON line for each figure goes to OUTPUT. `--tiny` checks the script on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from speed_parts import size_of

ROOT = Path(__file__).resolve().parents[2]
ROWS = 4
"""Of a step, in one micro-batch."""
VOCABULARY = 50_000
EVERY_PRODUCT = {"loss_budget": "all", "head": "fp8"}
POLICIES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"lora.quantize": "fp8", "model.fp8": EVERY_PRODUCT},
}


def prepare(folder: Path, size: Any, steps: int) -> None:
    """Random weights, a tokenizer, and documents of random tokens of many lengths."""
    import numpy as np
    import torch
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = min(VOCABULARY, size.config["vocab_size"])
    if not (folder / "model" / "tokenizer.json").exists():
        torch.manual_seed(0)
        config = AutoConfig.for_model(size.family, **size.config, eos_token_id=1, pad_token_id=0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder / "model")
        words = {f"<{index}>": index for index in range(vocabulary)}
        core = Tokenizer(models.WordLevel(words, unk_token="<0>"))
        PreTrainedTokenizerFast(
            tokenizer_object=core, pad_token="<0>", eos_token="<1>"
        ).save_pretrained(folder / "model")
    random = np.random.default_rng(0)
    left = 5 * steps * ROWS * size.length // 4
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        while left > 0:
            ids = random.integers(2, vocabulary, random.integers(size.length // 8, size.length))
            labels = [-100] * (len(ids) // 3) + ids[len(ids) // 3 :].tolist()
            file.write(json.dumps({"input_ids": ids.tolist(), "labels": labels}) + "\n")
            left -= len(ids)


def start(policy: str, folder: Path, size: Any, steps: int) -> subprocess.Popen[bytes]:
    """A run that imports, and waits for its gate."""
    recipe = {
        "model": {"name_or_path": str(folder / "model"), "dtype": "bfloat16"},
        "data": {"train": [str(folder / "rows.jsonl")], "max_length": size.length, "packing": True},
        "kernels": True,
        "lora": {"r": 16, "alpha": 32},
        "global_batch_size": ROWS,
        "training": {
            "per_device_train_batch_size": ROWS,
            "learning_rate": 1e-4,
            "max_steps": steps,
            "logging_steps": 1,
            "save_strategy": "no",
        },
    }
    path = folder / f"{policy}.json"
    path.write_text(json.dumps(recipe), encoding="utf-8")
    words = ["sft", "--config", str(path), "--output-dir", str(folder / policy), "--force"]
    words += [f"{key}={json.dumps(value)}" for key, value in POLICIES[policy].items()]
    gate(folder, policy).unlink(missing_ok=True)
    script = str(ROOT / "scripts" / "start_at_file.py")
    with (folder / f"{policy}.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, script, str(gate(folder, policy)), "trainkit.cli.app", *words],
            stdout=log,
            stderr=log,
            env=os.environ
            | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        )


def gate(folder: Path, policy: str) -> Path:
    """The file that lets a run go on from its imports."""
    return folder / f"{policy}.go"


def figures(run: Path) -> dict[str, float]:
    """Of a run's own log, over the second half of its steps."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "step_seconds" in row]
    settled = rows[len(rows) // 2 :]
    seconds = [row["step_seconds"] for row in settled]
    return {
        "trained_tokens_per_second": sum(row["num_trained_tokens"] for row in settled)
        / sum(seconds),
        "ms": 1e3 * sorted(seconds)[len(seconds) // 2],
        "peak_memory_gib": settled[-1].get("peak_memory_gib") or 0.0,
    }


def main() -> None:
    """Run both."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/fp8_sft"))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=85)
    parser.add_argument("--commit", default=None)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    began = time.monotonic()
    size = size_of("qwen2-7b", args.tiny)
    args.folder.mkdir(parents=True, exist_ok=True)
    runs = {policy: start(policy, args.folder, size, args.steps) for policy in POLICIES}
    try:
        prepare(args.folder, size, args.steps)
        import torch

        from trainkit.bench.measure.record import append, environment, records

        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        about, speeds = environment(args.commit), {}
        print(f"weights and rows at {time.monotonic() - began:.0f} s", flush=True)
        for policy, process in runs.items():
            gate(args.folder, policy).touch()
            try:
                status = process.wait(max(1.0, args.seconds - (time.monotonic() - began)))
            except subprocess.TimeoutExpired:
                status = None
            log = (args.folder / f"{policy}.log").read_text(errors="replace")
            if status != 0:
                print(policy, "stopped" if status is None else "FAILED", log[-1500:], flush=True)
                break
            found = figures(args.folder / policy)
            speeds[policy] = found["trained_tokens_per_second"]
            case = f"qwen2-7b lora, trainkit sft, packed: {policy} base"
            append(args.output, records("fp8", case, "trainkit", found, about))
            print(f"{case} {found} at {time.monotonic() - began:.0f} s", flush=True)
            print(
                *[line for line in log.splitlines() if "fp8" in line or "saves" in line], sep="\n"
            )
    finally:
        for process in runs.values():
            process.kill()
    if len(speeds) == len(POLICIES):
        print(f"fp8 trains {speeds['fp8'] / speeds['bf16']:.3f} times the tokens a second")


if __name__ == "__main__":
    main()
