"""Brings the pages' tables up to date with docs/benchmarks: python docs/tutorial/tables.py

A row of a table names its case and its provider; its other cells are filled from the row of
measurements with the same names. A cell that one of them confirms stays.
"""

import json
from pathlib import Path

PAGES = sorted(Path(__file__).parent.glob("[0-9]*-*.md"))
METRICS = {
    "us": "microseconds",
    "of copy": "share_of_copy",
    "ms": "ms",
    "forward ms": "forward",
    "backward ms": "backward",
    "extra GiB": "extra_memory_gib",
    "TFLOP/s": "tflops",
    "registers": "registers",
    "spills": "spills",
    "shared KiB": "shared_kib",
}


def measured() -> dict[tuple[str, str, str], list[float]]:
    """Every measured value, by case, provider and metric; the latest last."""
    values: dict[tuple[str, str, str], list[float]] = {}
    for path in sorted((Path(__file__).parents[1] / "benchmarks").glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if "metric" in row:
                key = (row["case"], row["provider"], row["metric"])
                values.setdefault(key, []).append(row["value"])
    return values


def updated(text: str, values: dict[tuple[str, str, str], list[float]]) -> str:
    """The page with every cell that no measurement confirms replaced by one.

    Raises:
        KeyError: a table names a case and a provider that were not measured.
    """
    lines, header = [], None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            header = None
        elif "provider" in cells:
            header = cells
        elif header and not set(line) <= set("|-: "):
            named = dict(zip(header, cells, strict=True))
            for column in METRICS.keys() & named.keys():
                found = values[named["case"], named["provider"], METRICS[column]]
                known = [_printed(value, named[column]) for value in found]
                if named[column] not in known:
                    named[column] = known[-1]
            line = f"| {' | '.join(named.values())} |"  # noqa: PLW2901
        lines.append(line)
    return "\n".join(lines) + "\n"


def _printed(value: float, like: str) -> str:
    if like.endswith("%"):
        return f"{value:.0%}"
    return f"{value:.{len(like.partition('.')[2])}f}"


def main() -> None:
    """Rewrite the pages."""
    values = measured()
    for page in PAGES:
        page.write_text(updated(page.read_text(encoding="utf-8"), values), encoding="utf-8")


if __name__ == "__main__":
    main()
