"""How long a user waits: for help, for a mistake in a recipe to be named, for the first step.

    python scripts/surface_speed.py docs/benchmarks/surface.jsonl
    python scripts/surface_speed.py rows.jsonl --first-step      # on a GPU: a 0.5B run

Help and mistakes are measured as the CPU time of the command, the least of several tries: on an
idle core that is what a user waits. The first step is measured by the clock, from the command to
the line of step 1, of a second run: data and compiled kernels are cached, as on any working day.
The model has the shape of Qwen2.5-0.5B and random weights; its tokenizer has as many tokens.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from chatml_tokenizer import chatml_tokenizer

from trainkit.bench.measure.record import append, environment, records

ROOT = Path(__file__).resolve().parents[1]
TRAINKIT = [sys.executable, "-m", "trainkit"]
HERE = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
VOCABULARY = 151_643
SHAPE = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}
SMALL = {"vocab_size": 2_000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
GOALS = {"help": 0.3, "recipe error": 0.8, "first step": 12.0}


def main() -> None:
    """Measure, print and append rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--first-step", action="store_true", help="only the first step, on a GPU")
    parser.add_argument("--small", action="store_true", help="with a tiny model, to try it out")
    parser.add_argument("--tries", type=int, default=5)
    options = parser.parse_args()
    common = environment()
    found = first_step(options.small) if options.first_step else commands(options.tries)
    for case, values in found.items():
        rows = records("surface", case, "trainkit", values, common, goal=GOALS[case])
        append(options.output, rows)
        for row in rows:
            print(f"{case}: {row['metric']} {row['value']:.2f} s (goal {row['goal']} s)")


def commands(tries: int) -> dict[str, dict[str, float]]:
    """Help and a recipe with a mistake: the least of several tries."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder, "r.yaml")
        recipe.write_text("model: {name_or_path: m}\ndata: {train: [d.jsonl]}\nlerning_rate: 1\n")
        cases = {"help": (["--help"], 0), "recipe error": (["sft", str(recipe)], 2)}
        found = {}
        for case, (words, code) in cases.items():
            timed = [_timed([*TRAINKIT, *words], code) for _ in range(tries)]
            found[case] = {"cpu_seconds": min(timed)}
    return found


def _timed(command: Sequence[str], code: int) -> float:
    """CPU seconds of a command."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, env=HERE, **quiet)  # type: ignore[call-overload]
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == code, (command, process.returncode)
    return usage.ru_utime + usage.ru_stime


def first_step(small: bool) -> dict[str, dict[str, float]]:
    """A run, and the same once more: how long the second takes to its first step."""
    root = Path(tempfile.mkdtemp(prefix="surface-"))
    try:
        _make_project(root, small)
        times = [_seconds_to_first_step(root) for _ in range(2)]
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(f"the first run of all, with kernels to compile: {times[0]:.1f} s")
    return {"first step": {"seconds": times[1]}}


def _seconds_to_first_step(root: Path) -> float:
    started = time.perf_counter()
    process = subprocess.Popen(
        [*TRAINKIT, "sft", "r.yaml"],
        cwd=root,
        env=HERE,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    assert process.stderr is not None
    seconds = None
    for line in process.stderr:
        text = line.decode(errors="replace").rstrip()
        print(f"  {time.perf_counter() - started:6.2f} s  {text[:110]}", flush=True)
        if text.startswith("step 1/") and seconds is None:
            seconds = time.perf_counter() - started
    assert process.wait() == 0
    assert seconds is not None
    return seconds


def _make_project(root: Path, small: bool) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = SHAPE | (SMALL if small else {})
    torch.manual_seed(0)
    model = Qwen2ForCausalLM._from_config(Qwen2Config(**shape), dtype=torch.bfloat16)
    model.save_pretrained(root / "m")
    _make_tokenizer(1_500 if small else VOCABULARY).save_pretrained(root / "m")
    with (root / "d.jsonl").open("w", encoding="utf-8") as file:
        for number in range(2_000):
            answer = " ".join(f"word{(number * 7 + at) % 997}" for at in range(60))
            turns = [
                {"role": "user", "content": f"Say something about {number}."},
                {"role": "assistant", "content": answer},
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    (root / "r.yaml").write_text(
        "model: {name_or_path: m}\n"
        "data: {train: [d.jsonl], max_length: 2048, packing: true, cache_dir: cache}\n"
        "kernels: true\n"
        "training: {learning_rate: 1.0e-5, per_device_train_batch_size: 4, max_steps: 3,\n"
        "  save_strategy: 'no', logging_steps: 1, report_to: none}\n"
    )


def _make_tokenizer(size: int):  # type: ignore[no-untyped-def]
    """Byte-level BPE with as many tokens and merges as Qwen2's: it takes as long to load."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    left = list(alphabet)
    while len(vocabulary) < size:
        longer = []
        for first in left:
            for second in alphabet:
                if len(vocabulary) < size and first + second not in vocabulary:
                    vocabulary[first + second] = len(vocabulary)
                    merges.append((first, second))
                    longer.append(first + second)
        left = longer
    return chatml_tokenizer(vocabulary, merges)


if __name__ == "__main__":
    main()
