#!/usr/bin/env python3
"""What a run's record costs when the run is long: 200,000 logged rows.

    python scripts/long_run.py --json docs/benchmarks/long_run.jsonl

One row: seconds and MiB of a redraw of the curves, seconds to read the metrics for a resume, bytes
and seconds of the Trainer's state in a save. Each is measured in a process of its own.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def rows(number: int) -> list[dict[str, float]]:
    """Rows as a run logs them."""
    return [
        {
            "step": step,
            "epoch": step / number,
            "loss": 2.0 + 1.0 / (1 + step / 1000),
            "grad_norm": 1.0 + step % 7 / 10,
            "learning_rate": 1e-5 * (1 - step / number),
            "num_tokens": 4096,
            "num_trained_tokens": 2048,
            "step_seconds": 0.25,
            "tokens_per_second": 16384.0,
            "peak_memory_gib": 12.0,
            "data_seconds": 0.001,
        }
        for step in range(1, number + 1)
    ]


def redraw(run: Path) -> None:
    """What `python -m trainkit.run.report.redraw` does."""
    from trainkit.run.directory import RunDirectory
    from trainkit.run.report.redraw import draw_all

    draw_all(RunDirectory(run), is_training=True)


def resume(run: Path) -> None:
    """What a resume does to the metrics: those after the checkpoint are set aside."""
    from trainkit.run.metrics import MetricsWriter

    MetricsWriter(run / "metrics.jsonl", resume_step=10**9).close()


def save(run: Path) -> None:
    """The Trainer's state as a checkpoint has it, after that many logs."""
    from transformers import TrainerState

    from trainkit.train.trainer import ObjectiveTrainer

    class State:
        state = TrainerState()

    logged = rows(int((run / "number").read_text()))
    for row in logged:
        State.state.log_history.append(row)
        ObjectiveTrainer._forget_rows(State)  # type: ignore[arg-type]
    began = time.process_time()
    State.state.save_to_json(str(run / "trainer_state.json"))
    (run / "save_seconds").write_text(f"{time.process_time() - began}")


WORK: dict[str, Callable[[Path], None]] = {"redraw": redraw, "resume": resume, "save": save}


def measured(name: str, run: Path) -> tuple[float, float]:
    """Seconds and peak MiB of a piece of work, over those of the imports it needs."""
    code = (
        "import json, sys, time\n"
        f"sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'scripts')!r}]\n"
        "import long_run, trainkit.run.report.redraw, matplotlib.figure\n"
        "from pathlib import Path\n"
        "text = lambda: Path('/proc/self/status').read_text()\n"
        "peak = lambda: int(text().partition('VmHWM:')[2].split()[0]) / 1024\n"
        "before, began = peak(), time.process_time()\n"
        f"long_run.WORK[{name!r}](Path({str(run)!r}))\n"
        "print(json.dumps([time.process_time() - began, peak() - before]))\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, mebibytes = json.loads(said.stdout.splitlines()[-1])
    return seconds, mebibytes


def main() -> None:
    """Measure, print, and write the row."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--json", type=Path, help="the file that gets the row")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch)
        (run / "plots").mkdir()
        (run / "number").write_text(str(arguments.rows))
        lines = [json.dumps(row) + "\n" for row in rows(arguments.rows)]
        (run / "metrics.jsonl").write_text("".join(lines))
        found: dict[str, float] = {"rows": arguments.rows}
        for name in WORK:
            seconds, mebibytes = measured(name, run)
            found |= {f"{name}_cpu_seconds": round(seconds, 2), f"{name}_mib": round(mebibytes, 1)}
        found["save_cpu_seconds"] = round(float((run / "save_seconds").read_text()), 3)
        del found["save_mib"]
        found["state_kib"] = round((run / "trainer_state.json").stat().st_size / 1024, 1)

    line = json.dumps(found)
    if arguments.json is not None:
        arguments.json.write_text(line + "\n")
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
