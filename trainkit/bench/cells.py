"""Cells: what one process measures. All import before the first one gets the GPU.

Run as ``python -m trainkit.bench.cells BENCH`` it is the process of one cell.
"""

import contextlib
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from trainkit.bench.providers import MODELS, Shape
from trainkit.processes import module_command
from trainkit.run.environment import repository_state

FIRST_IMPORT = "TRAINKIT_BENCH_FIRST_IMPORT"
"""The variable that names what a process imports before anything else."""


@dataclass(frozen=True)
class Cell:
    """What one process measures."""

    bench: str
    model: str
    provider: str
    mode: str = ""
    warm_up_seconds: float = 3.0
    steps: int = 12
    settings: Mapping[str, Any] = field(default_factory=dict)
    shape: Shape | None = None

    @property
    def size(self) -> Shape:
        return self.shape or MODELS[self.model]


def run(
    cells: Sequence[Cell],
    *,
    environments: Sequence[Mapping[str, str]] | None = None,
    together: bool = False,
) -> Iterator[dict[str, Any]]:
    """Measure cells one after another, each in a process of its own.

    Where nothing is timed, ``together`` starts the work of all at once.

    Yields:
        Per cell its model, provider and mode with what ``measure`` returned, or with ``error``, the
        end of what the process said.
    """
    extras = environments or [{}] * len(cells)
    processes = [_start(cell, extra) for cell, extra in zip(cells, extras, strict=True)]
    try:
        if together:
            for cell, process in zip(cells, processes, strict=True):
                _send(cell, process)
        else:
            for process in processes:
                assert process.stdout is not None
                process.stdout.readline()  # all have imported: nothing runs next to the clock
        for cell, process in zip(cells, processes, strict=True):
            if not together:
                _send(cell, process)
            output, errors = process.communicate()
            row = {"model": cell.model, "provider": cell.provider}
            row |= {"mode": cell.mode} if cell.mode else {}
            if process.returncode:
                yield {**row, "error": errors.strip()[-2000:]}
            else:
                yield {**row, **json.loads(output.strip().split("\n")[-1])}
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()


def _start(cell: Cell, extra: Mapping[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        module_command("trainkit.bench.cells", cell.bench),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **extra},
    )


def _send(cell: Cell, process: "subprocess.Popen[str]") -> None:
    with contextlib.suppress(BrokenPipeError):  # it died: its stderr says why
        if process.stdin is not None:
            process.stdin.write(json.dumps(asdict(cell)) + "\n")
            process.stdin.flush()


# -- Records: what was measured, on what, with which versions --------------------------------------

UNITS = {
    "ms": "ms",
    "microseconds": "us",
    "tokens_per_second": "tokens/s",
    "trained_tokens_per_second": "tokens/s",
    "tflops": "TFLOP/s",
    "tflops_sustained": "TFLOP/s",
    "gb_per_second": "GB/s",
    "mfu": "share of peak",
    "share_of_copy": "share",
    "share_of_matmul": "share",
    "peak_memory_gib": "GiB",
    "extra_memory_gib": "GiB",
    "seconds": "s",
    "first_step_seconds": "s",
    "gpu_memory_gib": "GiB",
    "cpu_seconds": "s",
    "cached_start_seconds": "s",
    "rows_per_second": "rows/s",
    "pairs_per_second": "pairs/s",
    "images_per_second": "images/s",
    "packing_fill": "share",
    "speedup": "times",
    "memory_saving": "share",
    "loss": "nats",
    "loss_error": "share",
    "max_difference": "nats",
    "mean_difference": "nats",
}
"""Every metric a benchmark may record, and its unit."""

_PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "liger-kernel",
    "quack-kernels",
    "unsloth",
    "peft",
    "bitsandbytes",
    "trl",
    "tokenizers",
    "datasets",
)


def environment(commit: str | None = None) -> dict[str, Any]:
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": dict(_versions()),
        "commit": commit or _git_commit(),
    }


def append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


class Records:
    """Makes flat records of one benchmark, one per metric, and adds them to a file."""

    def __init__(self, bench: str, output: Path | None = None, commit: str | None = None) -> None:
        self._bench, self._output = bench, output
        self.common = environment(commit)

    def of(self, case: str, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """One provider's figures on a case; none of a row with an ``error``.

        What `UNITS` names and is not None becomes a record; the rest (batch size, length, settings)
        are keys of every record.
        """
        if "error" in row:
            return []
        conditions = {k: v for k, v in row.items() if k not in UNITS and k != "provider"}
        found = [
            {
                "bench": self._bench,
                "case": case,
                "provider": row["provider"],
                "metric": metric,
                "value": round(value, 6),
                "unit": UNITS[metric],
                **conditions,
                **self.common,
            }
            for metric, value in row.items()
            if metric in UNITS and value is not None
        ]
        if self._output is not None:
            append(self._output, found)
        return found

    def ceilings(self) -> list[dict[str, Any]]:
        from trainkit.bench.measure import ceilings

        values = ceilings(torch.device("cuda"))
        torch.cuda.empty_cache()
        return self.of("ceiling", {"provider": "torch", **values})


def _versions() -> Iterable[tuple[str, str]]:
    for package in _PACKAGES:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue


def _git_commit() -> str:
    """The commit of this package's own checkout, ``-dirty`` where the code differs from it."""
    state = repository_state(Path(__file__).parent)
    if state is None:
        return "unknown"
    # A file that git does not know is none of the code.
    is_changed = any(not line.startswith("??") for line in state["changed_files"] or [])
    return state["commit"][:10] + ("-dirty" if is_changed else "")


def main() -> None:
    """The process of one cell: import, read it from stdin, measure it, write one JSON line."""
    if FIRST_IMPORT in os.environ:
        importlib.import_module(os.environ[FIRST_IMPORT])
    import transformers  # noqa: F401  (imported while other cells have the GPU)

    module = importlib.import_module(sys.argv[1])
    sys.stdout.write("imported\n")
    sys.stdout.flush()
    values = json.loads(sys.stdin.readline())
    shape = values.pop("shape")
    cell = replace(Cell(**values), shape=None if shape is None else Shape(**shape))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sys.stdout.write("\n" + json.dumps(module.measure(cell, device)) + "\n")


if __name__ == "__main__":
    main()
