"""Measurements as flat records: what was measured, on what, with which versions."""

import importlib.metadata
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from trainkit.run.git import repository_state

UNITS = {
    "ms": "ms",
    "matmul_ms": "ms",
    "attention_ms": "ms",
    "loss_ms": "ms",
    "rope_ms": "ms",
    "norm_and_gate_ms": "ms",
    "elementwise_ms": "ms",
    "other_ms": "ms",
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
    "sm_clock_mhz": "MHz",
    "seconds": "s",
    "cpu_seconds": "s",
    "cached_start_seconds": "s",
    "rows_per_second": "rows/s",
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
    """gpu, versions and commit, as every record carries them.

    Args:
        commit: of the code that ran; read from the package's own checkout when None.
    """
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": dict(_versions()),
        "commit": commit or _git_commit(),
    }


def append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add records to a file of JSON lines."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


class Records:
    """Makes flat records of one benchmark, one per metric, and adds them to a file.

    Args:
        bench: the benchmark.
        output: a file of JSON lines; None for none.
        commit: of the code that ran; read from the package's own checkout when None.
    """

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
        """What this GPU can do at most, in this run."""
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
