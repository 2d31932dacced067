"""How long a user waits: for help, for a mistake in a recipe to be named, for the first step.

    python scripts/surface_speed.py docs/benchmarks/surface.jsonl
    python scripts/surface_speed.py rows.jsonl --first-step      # on a GPU: a 0.5B run

Help and mistakes are measured as the CPU time of the command, the least of several tries: on an
idle core that is what a user waits. The first step is measured by the clock, from the command to
the line of step 1: once with nothing compiled yet, then of the same recipe again, as on any working
day, with data and compiled kernels cached. Each start gives a row for every stage that it went
through (``start.json`` of the run), written at once. Python keeps the modules that it has
compiled, as wherever pip has installed them. The model has the shape of Qwen2.5-0.5B and random
weights; its tokenizer has as many tokens.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainkit.bench.measure.record import append, environment, records
from trainkit.run.stages import FILE

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
COLD = "first step, nothing compiled"


def main() -> None:
    """Measure, print and append rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--first-step", action="store_true", help="only the first step, on a GPU")
    parser.add_argument("--small", action="store_true", help="with a tiny model, to try it out")
    parser.add_argument("--tries", type=int, default=5, help="of each command; starts: one less")
    parser.add_argument("--seconds", type=float, default=110.0, help="for all starts together")
    parser.add_argument("--folder", type=Path, help="keep model, data and recipe here")
    options = parser.parse_args()
    common = environment()
    measured = first_steps(options) if options.first_step else commands(options.tries)
    for case, values in measured:
        rows = records("surface", case, "trainkit", values, common, goal=GOALS.get(case))
        append(options.output, rows)
        for row in rows:
            goal = "" if row["goal"] is None else f" (goal {row['goal']} s)"
            print(f"{case}: {row['metric']} {row['value']:.2f} s{goal}", flush=True)


def commands(tries: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Help and a recipe with a mistake: the least of several tries."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder, "r.yaml")
        recipe.write_text("model: {name_or_path: m}\ndata: {train: [d.jsonl]}\nlerning_rate: 1\n")
        cases = {"help": (["--help"], 0), "recipe error": (["sft", str(recipe)], 2)}
        for case, (words, code) in cases.items():
            timed = [_timed([*TRAINKIT, *words], code) for _ in range(tries)]
            yield case, {"cpu_seconds": min(timed)}


def _timed(command: Sequence[str], code: int) -> float:
    """CPU seconds of a command."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, env=HERE, **quiet)  # type: ignore[call-overload]
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == code, (command, process.returncode)
    return usage.ru_utime + usage.ru_stime


def first_steps(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, float]]]:
    """A start with an empty cache of compiled kernels, then the same start again and again."""
    ends = time.monotonic() + options.seconds
    root = options.folder or Path(tempfile.mkdtemp(prefix="surface-"))
    root.mkdir(parents=True, exist_ok=True)
    try:
        began = time.perf_counter()
        _make_project(root, options.small)
        print(f"model and data made in {time.perf_counter() - began:.1f} s", flush=True)
        # Hosts without bytecode compile thousands of modules in every start: no usual machine.
        compiled = {
            "TRITON_CACHE_DIR": str(root / "triton"),
            "PYTHONPYCACHEPREFIX": str(root / "bytecode"),
        }
        for number in range(options.tries):
            if ends - time.monotonic() < 5:
                break
            found = _start(root, compiled, ends - time.monotonic())
            if found is None:
                break
            case = "first step" if number else COLD
            yield case, {"seconds": found.pop("seconds")}
            for stage, seconds in found.items():
                yield f"{case}: {stage}", {"seconds": seconds}
    finally:
        if options.folder is None:
            shutil.rmtree(root, ignore_errors=True)


def _start(root: Path, variables: dict[str, str], left: float) -> dict[str, float] | None:
    """Seconds until the line of step 1 and of each stage; the run is ended there.

    None if it took longer than ``left`` seconds: then it has said where it was.
    """
    run = root / f"run-{time.time_ns()}"
    unset = {name: each for name, each in HERE.items() if name != "PYTHONDONTWRITEBYTECODE"}
    began = time.perf_counter()
    process = subprocess.Popen(
        [*TRAINKIT, "sft", "r.yaml", "-o", str(run)],
        cwd=root,
        env={**unset, **variables, "PYTHONFAULTHANDLER": "1"},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stderr is not None
    # With PYTHONFAULTHANDLER the stack of every thread is written.
    too_late = threading.Timer(left, process.send_signal, [signal.SIGABRT])
    too_late.start()
    seconds = None
    for line in process.stderr:
        text = line.decode(errors="replace").rstrip()
        print(f"  {time.perf_counter() - began:6.2f} s  {text[:110]}", flush=True)
        if text.startswith("step 1/"):
            seconds = time.perf_counter() - began
            break
    too_late.cancel()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if seconds is None:
        return None
    start = json.loads((run / FILE).read_text())
    shutil.rmtree(run)
    return {"seconds": seconds, **start["stages"]}


def _make_project(root: Path, small: bool) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = SHAPE | (SMALL if small else {})
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
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
    from tokenizers import Tokenizer, models, pre_tokenizers

    from trainkit.quickstart import chatml_tokenizer

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
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return chatml_tokenizer(core)


if __name__ == "__main__":
    main()
