"""Cells: what one process measures. All import before the first one gets the GPU.

Run as ``python -m trainkit.bench.cells BENCH`` it is the process of one cell.
"""

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from trainkit.bench.providers import MODELS, Shape
from trainkit.processes import module_command

FIRST_IMPORT = "TRAINKIT_BENCH_FIRST_IMPORT"
"""The variable that names what a process imports before anything else."""


@dataclass(frozen=True)
class Cell:
    """What one process measures.

    Args:
        bench: a module with ``measure(cell, device)``.
        model: a key of `MODELS`.
        provider: whose code runs.
        mode: of a bench that has several.
        warm_up_seconds: before the clock runs; clocks and temperature settle meanwhile.
        steps: on the clock.
        settings: the bench's own.
        shape: measured instead of the model's own.
    """

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
        """The shape this cell runs."""
        return self.shape or MODELS[self.model]


def run(
    cells: Sequence[Cell],
    *,
    environments: Sequence[Mapping[str, str]] | None = None,
    together: bool = False,
) -> Iterator[dict[str, Any]]:
    """Measure cells one after another, each in a process of its own.

    Args:
        cells: what to measure.
        environments: what each process has in its environment besides ours.
        together: start the work of all at once, where nothing is timed.

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


def main() -> None:
    """The process of one cell: import, read it from stdin, measure it, write one JSON line."""
    if FIRST_IMPORT in os.environ:
        importlib.import_module(os.environ[FIRST_IMPORT])
    import torch
    import transformers  # noqa: F401  (imported while other cells have the GPU)

    module = importlib.import_module(sys.argv[1])
    values = json.loads(sys.stdin.readline())
    shape = values.pop("shape")
    cell = replace(Cell(**values), shape=None if shape is None else Shape(**shape))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sys.stdout.write("\n" + json.dumps(module.measure(cell, device)) + "\n")


if __name__ == "__main__":
    main()
