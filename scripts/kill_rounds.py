"""Rounds of kills of one cell, and what they have shown so far."""

import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kill_starts import Starts
from moments import Kill, differences, digest_of

KINDS = {
    "full-fp32": "model: {name_or_path: m, dtype: float32}\n",
    "full-bf16": "model: {name_or_path: m, dtype: bfloat16}\n",
    "lora-bf16": "model: {name_or_path: m, dtype: bfloat16}\nlora: {r: 4, dropout: 0.1}\n",
    "streaming": "model: {name_or_path: m, dtype: bfloat16}\nlora: {r: 4, dropout: 0.1}\n",
    "qlora": "model: {name_or_path: m, dtype: bfloat16}\nlora: {r: 4, quantize: nf4}\n",
}
"""What is trained; qlora wants a GPU."""

SPREADS = {
    "one": (1, "none"),
    "ddp": (2, "none"),
    "zero1": (2, "zero1"),
    "zero2": (2, "zero2"),
    "zero3": (2, "zero3"),
    "fsdp2": (2, "fsdp2"),
}
"""Processes, and ``parallel.shard``."""

DATA = "data: {{train: [d.jsonl], max_length: 64, packing: false, cache_dir: {cache}{stream}}}\n"
TRAINING = (
    "training: {learning_rate: 1e-2, per_device_train_batch_size: 2, max_steps: 10, save_steps: 2,"
    " save_total_limit: 2, gradient_accumulation_steps: 2}\nfaults: {step_timeout: 60}\n"
)
PHASES = {"save": 45, "kept": 10, "train": 15, "load": 10, "data": 10, "start": 10}
"""Where the kill comes, and how often of a hundred."""


STEPS = 10
KILLS_A_ROUND = 8
"""At most: a round is over when a start was done before its kill came."""


@dataclass
class Row:
    """What a cell has seen so far."""

    cell: str
    starts: str = "forked"
    kills: int = 0
    rounds: int = 0
    exact: int = 0
    phases: dict[str, int] = field(default_factory=dict)
    victims: dict[str, int] = field(default_factory=dict)
    inside_saves: int = 0
    slowest_end_seconds: float = 0.0
    failures: list[str] = field(default_factory=list)

    def missing(self, kills: int, in_saves: int) -> tuple[int, int]:
        """How many are left of so many kills, and of so many of them inside a save."""
        return max(kills - self.kills, 0), max(in_saves - self.inside_saves, 0)


# -- rounds --------------------------------------------------------------------------------------


class Cell:
    """One kind of training under one way to spread it."""

    def __init__(self, name: str, starts: Starts, overrides: Sequence[str] = ()) -> None:
        self.name, self._starts, self._overrides = name, starts, overrides
        self.kind, _, spread = name.partition("/")
        self.num_ranks, shard = SPREADS[spread]
        stream = ", streaming: true" if self.kind == "streaming" else ""
        self._text = KINDS[self.kind] + TRAINING + f"parallel: {{shard: {shard}}}\n"
        self._data = {"stream": stream}

    def _run(self, number: str, kill: Kill | None) -> tuple[int, Path]:
        """The command of one round: the same every time."""
        folder = self._starts.folder
        recipe, run = folder / f"recipe{number}.yaml", folder / f"run{number}"
        recipe.write_text(self._text + DATA.format(cache=f"cache{number}", **self._data))
        arguments = ["--config", recipe.name, "--output-dir", run.name, "--resume"]
        given = [*arguments, *self._overrides]
        code = self._starts.start(given, run, self.num_ranks, kill)
        return code, run

    def whole(self) -> tuple[dict[str, str], list[Counter[str]]]:
        """The run that nobody kills: its bytes, and what each rank does to files in each phase."""
        code, run = self._run(f"-{self.name.replace('/', '-')}-whole", None)
        if code:
            raise RuntimeError(f"{self.name}: the whole run ended with {code}")
        reports = [self._starts.folder / f"files.{rank}" for rank in range(self.num_ranks)]
        counts = [Counter(json.loads(path.read_text())) for path in reports]
        digest = digest_of(run)
        self._clear("-whole")
        return digest, counts

    def round(
        self,
        row: Row,
        whole: dict[str, str],
        counts: list[Counter[str]],
        *,
        missing: tuple[int, int],
        until: float,
    ) -> None:
        """Kill some starts of a run, let the last one be, and compare.

        Args:
            row: is told what came of it.
            whole: the bytes of the run that nobody killed.
            counts: what each rank of it does to files.
            missing: kills, and how many inside a save; it stops at these.
            until: none later, by `time.monotonic`.
        """
        chance = random.Random(f"{self.name}/{row.starts}/{row.rounds}/{KILLS_A_ROUND}")
        number = f"-{self.name.replace('/', '-')}-{row.rounds}"
        run = self._starts.folder / f"run{number}"
        row.rounds += 1
        events: list[str] = []
        enough = row.kills + missing[0], row.inside_saves + missing[1]

        def goes_on() -> bool:
            more = any(row.missing(*enough)) and len(events) < KILLS_A_ROUND
            return more and time.monotonic() < until

        try:
            while goes_on():
                kills, saves = row.missing(*enough)
                kill = self._draw(chance, counts, row, run, only_saves=saves >= kills)
                events.append(f"{kill.victim} {kill.phase} {kill.at} +{kill.delay:.3f}")
                code, _ = self._run(number, kill)
                events[-1] += f" -> {code}"
                if not self._count(row, kill, run):
                    break  # this start had ended before its kill came
            else:
                code, _ = self._run(number, None)
            wrong = differences(whole, digest_of(run)) if code == 0 else [f"exit code {code}"]
        except (TimeoutError, OSError, ValueError) as error:
            wrong = [f"{type(error).__name__}: {error}"]
        if wrong:
            row.failures.append(f"round {row.rounds - 1}: {'; '.join(wrong[:6])} after {events}")
        else:
            row.exact += 1
            self._clear(number)

    def _count(self, row: Row, kill: Kill, run: Path) -> bool:
        """Whether the kill came; notes it."""
        struck = self._starts.folder / "files"
        if not struck.exists():
            return False
        ended = time.time() - struck.stat().st_mtime
        row.slowest_end_seconds = max(row.slowest_end_seconds, round(ended, 1))
        struck.unlink()
        row.kills += 1
        row.phases[kill.phase] = row.phases.get(kill.phase, 0) + 1
        row.victims[kill.victim] = row.victims.get(kill.victim, 0) + 1
        row.inside_saves += any(run.glob(".*staging*"))
        return True

    def _draw(
        self,
        chance: random.Random,
        counts: list[Counter[str]],
        row: Row,
        run: Path,
        *,
        only_saves: bool,
    ) -> Kill:
        """A moment of what is left of the run, so that most kills come."""
        more = 2 if row.inside_saves < 0.4 * row.kills else 1
        weights = {**PHASES, "save": more * PHASES["save"]}
        phase = "save" if only_saves else chance.choices(list(weights), list(weights.values()))[0]
        rank = chance.randrange(self.num_ranks)
        saved = run.glob("checkpoint-*")
        done = max((int(path.name.partition("-")[2]) for path in saved), default=0)
        share = {"save": 1 - done / STEPS, "start": 0.7, "load": 0.6, "data": 0.7}
        most = max(int(counts[rank].get(phase, 0) * (share.get(phase, 1) if done else 1)), 1)
        delay = {"train": 1.5, "start": 0.3, "load": 0.3}.get(phase, 0.03)
        victim = chance.choice(("rank", "launcher", "group")) if self.num_ranks > 1 else "rank"
        at = 1 if phase == "train" else chance.randint(1, most)
        return Kill(phase, at, chance.uniform(0, delay) * chance.random(), rank, victim)

    def _clear(self, number: str) -> None:
        for path in self._starts.folder.glob(f"*{number}*"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
