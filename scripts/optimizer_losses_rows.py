"""The rows of `optimizer_losses.py`: losses less those of AdamW's same steps."""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainkit.bench.measure.record import environment

REFERENCE, UNCLIPPED = "adamw", "adamw unclipped"
SAME = 2e-3
"""By how much first losses of the same weights and rows may differ: kernels sum in other orders."""


class Table:
    """Rows of a file, less AdamW's losses; they wait for these where AdamW runs as well."""

    def __init__(self, path: Path, about: dict[str, Any], names: Iterable[str]) -> None:
        self._path, self._about = path, about
        self._awaited = set(names) & {REFERENCE, UNCLIPPED}
        self._references: dict[str, dict[str, Any]] = {}
        self._held: list[tuple[Any, dict[str, Any]]] = []

    def hold_against(self, path: Path, steps: int) -> None:
        """Take AdamW's losses of the same length, rate and number of steps from other rows."""
        same = ("bench", "length", "learning_rate")
        for line in path.read_text("utf-8").splitlines():
            row = json.loads(line)
            is_same = all(row.get(key) == self._about[key] for key in same)
            if (
                is_same
                and len(row.get("losses", ())) == steps
                and row["name"] in (REFERENCE, UNCLIPPED)
            ):
                self._references[row["name"]] = row
        self._awaited -= set(self._references)

    def add(self, case: Any, values: dict[str, Any]) -> None:
        """Write a row, or keep it until AdamW's is there."""
        if "losses" in values and case.name in (REFERENCE, UNCLIPPED):
            self._references[case.name] = values
        self._awaited.discard(case.name)
        self._held.append((case, values))
        if not self._awaited:
            self.write_held()

    def write_held(self) -> None:
        """Write what was kept."""
        for case, values in self._held:
            self._write(case, values)
        self._held.clear()

    def _write(self, case: Any, values: dict[str, Any]) -> None:
        row = {**self._about, **asdict(case), "steps": len(values.get("losses", ())), **values}
        for name, ending in ((REFERENCE, "adamw"), (UNCLIPPED, "adamw_unclipped")):
            reference = self._references.get(name)
            if reference is None or "losses" not in row or (name == UNCLIPPED and case.clips):
                continue
            apart = abs(row["losses"][0] - reference["losses"][0])
            if apart > SAME and not case.is_moved:
                row[f"not_over_{ending}"] = f"other rows: first losses are {apart:.4f} apart"
                continue
            number = len(row["losses"])
            same = reference["losses"][:number][-50:]
            row[f"last_50_over_{ending}"] = row["last_50"] - sum(same) / len(same)
            if number == len(reference["losses"]):
                row[f"held_out_over_{ending}"] = row["held_out"] - reference["held_out"]
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row, **environment()}) + "\n")
        said = {k: v for k, v in row.items() if k not in asdict(case) and k != "losses"}
        sys.stdout.write(f"{case.name:48s} {said}\n")
        sys.stdout.flush()
