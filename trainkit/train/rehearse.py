"""Kill and resume, rehearsed with the user's recipe: the same bytes, or what differs. No torch.

A shortened run goes through once; another is killed in a random step, resumed, killed while it
writes a checkpoint, resumed, and so on to its end. Weights, optimizer, schedule, random numbers and
the rows of metrics must be the same.
"""

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainkit.checkpoint.whole.manifest import hash_file
from trainkit.errors import TrainkitError
from trainkit.parallel.launch import free_port
from trainkit.places import checkpoints_in, step_of
from trainkit.processes import module_command
from trainkit.recipe import load_recipe
from trainkit.run.metrics import read_metrics

VARIABLE = "TRAINKIT_KILL"
"""Of a start that `trainkit.cli.killed` is to kill, JSON: `step` (and `after`, seconds into it) or
`write` (the how manyth file of a checkpoint is on its way to the disk); `rank`, which process;
`mark`, a file that is made just before."""

STEPS = 6
SAVE_STEPS = 2
_WITHOUT_MEASURES = (
    "generation_eval=null",
    "eval_tasks=null",
    "early_stopping=null",
    "training.metric_for_best_model=null",
    "training.greater_is_better=null",
    "training.eval_on_start=false",
)
"""What is measured does not touch the run, and neither does what would be decided by it."""

_FILES_OF_A_SAVE = 4
"""Every checkpoint has more files and folders than that."""

_STATES = {".safetensors", ".pt", ".pth", ".bin", ".distcp"}
_BY_THE_CLOCK = ("seconds", "per_second", "runtime", "mfu", "peak_memory")


class RehearsalError(TrainkitError):
    """A start of the rehearsed run did not do what it had to."""


@dataclass(frozen=True)
class Start:
    """One start of a rehearsed run.

    Attributes:
        what: unbroken, killed in step 3, killed while a checkpoint was written, resumed to the end.
    """

    what: str
    begins_at: int
    seconds: float


@dataclass
class Verdict:
    """What came of it."""

    is_same: bool = True
    compared: dict[str, bool] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    seconds: float = 0.0
    overrides: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {"verdict": "same" if self.is_same else "different", **asdict(self)}


def shortened(config: Path, overrides: Sequence[str]) -> tuple[str, ...]:
    """What makes a recipe short enough to be rehearsed, and leaves its numbers' way as it is."""
    recipe = load_recipe(config, overrides).recipe
    found = [
        f"training.max_steps={STEPS}",
        "training.save_strategy=steps",
        f"training.save_steps={SAVE_STEPS}",
        "training.save_total_limit=null",
        "training.save_only_model=false",
        "training.logging_steps=1",
        "training.logging_strategy=steps",
        "training.load_best_model_at_end=false",
        "training.report_to=none",
        "training.push_to_hub=false",
    ]
    if recipe.training.get("lr_scheduler_type") == "reduce_lr_on_plateau":
        # Its rates come from evaluations.
        found += ["training.eval_strategy=steps", f"training.eval_steps={SAVE_STEPS}"]
    else:
        found += _WITHOUT_MEASURES
        found += ["training.eval_strategy=no"] if recipe.data.eval else []
    accumulates = recipe.training.get("gradient_accumulation_steps", 1)
    if recipe.global_batch_size is not None or int(accumulates) > 2:
        found += ["global_batch_size=null", "training.gradient_accumulation_steps=2"]
    return tuple(found)


def rehearse(
    config: Path,
    overrides: Sequence[str] = (),
    *,
    num_ranks: int = 1,
    kills: int = 2,
    seed: int = 0,
    parent: Path = Path(),
    say: Callable[[str], None] = lambda _: None,
) -> Verdict:
    """Run, kill, resume and compare; nothing is left behind."""
    began = time.monotonic()
    verdict = Verdict(overrides=shortened(config, overrides))
    moments = random.Random(seed)
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".verify-resume-", dir=parent) as folder:
        rehearsal = _Rehearsal(Path(folder), num_ranks, verdict, say)
        given = ["--config", str(config), *overrides, *verdict.overrides]
        whole, broken = Path(folder, "whole"), Path(folder, "broken")
        rehearsal.start("unbroken", [*given, "--output-dir", str(whole)], whole)
        rows = [row for row in read_metrics(whole / "metrics.jsonl") if "loss" in row]
        pace = statistics.median([row["step_seconds"] for row in rows] or [0.0])
        command, step = [*given, "--output-dir", str(broken)], SAVE_STEPS
        for number in range(kills):
            plan: dict[str, Any] = {"rank": moments.randrange(num_ranks)}
            if number % 2:
                plan |= {"rank": 0, "write": moments.randint(1, _FILES_OF_A_SAVE)}
                what = "killed while a checkpoint was written"
            else:
                step = moments.randint(SAVE_STEPS + 1, STEPS)
                plan |= {"step": step, "after": moments.random() * pace}
                what = f"killed in step {step}"
            if not rehearsal.start(what, command, broken, plan):
                break  # it was done before the moment came
            command = ["--resume", str(broken)]
        else:
            rehearsal.start("resumed to the end", command, broken)
        _compare(whole, broken, verdict)
    verdict.seconds = round(time.monotonic() - began, 1)
    return verdict


@dataclass(frozen=True)
class _Rehearsal:
    folder: Path
    num_ranks: int
    verdict: Verdict
    say: Callable[[str], None]

    def start(
        self, what: str, arguments: Sequence[str], run: Path, plan: dict[str, Any] | None = None
    ) -> bool:
        """Run to the end, or to the kill that ``plan`` says; returns whether it was killed."""
        begins_at = max(map(step_of, checkpoints_in(run)), default=0)
        began = time.monotonic()
        log, mark = self.folder / "said.txt", self.folder / "killed"
        mark.unlink(missing_ok=True)
        code = _run(self._command(arguments), log, plan and {**plan, "mark": str(mark)})
        start = Start(what, begins_at, round(time.monotonic() - began, 1))
        self.verdict.starts.append(start)
        self.say(f"{what}: from step {begins_at}, {start.seconds:.0f} s")
        if code != 0 and not mark.exists():
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise RehearsalError(
                f"the start that was to be {what} failed by itself:\n{tail}",
                fix="see that the recipe trains: trainkit sft --config FILE --dry-run",
            )
        return mark.exists()

    def _command(self, arguments: Sequence[str]) -> list[str]:
        program = module_command("trainkit.cli.killed", "sft", *arguments)
        if self.num_ranks == 1:
            return program
        launcher = module_command("torch.distributed.run", "--nnodes", "1")
        launcher += ["--nproc-per-node", str(self.num_ranks), "--master-addr", "127.0.0.1"]
        return [*launcher, "--master-port", str(free_port()), *program[1:]]


def _run(command: Sequence[str], log: Path, plan: dict[str, Any] | None) -> int:
    environment = dict(os.environ)
    if plan is not None:
        environment[VARIABLE] = json.dumps(plan)
    if "torch.distributed.run" not in command:
        visible = environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        environment["CUDA_VISIBLE_DEVICES"] = visible  # or it would start on every GPU
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=stream, env=environment, start_new_session=True
        )
        try:
            return process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what a kill has left of it
            process.wait()


def _compare(whole: Path, broken: Path, verdict: Verdict) -> None:
    folders = {"last checkpoint": f"checkpoint-{STEPS}", "final model": "final"}
    for what, name in folders.items():
        theirs, ours = dict(_digests(whole / name)), dict(_digests(broken / name))
        unequal = sorted(k for k in {**theirs, **ours} if theirs.get(k) != ours.get(k))
        for file in unequal:
            verdict.differences.append(_explained(whole / name / file, broken / name / file))
        verdict.compared[f"{what}: {len(theirs)} files of weights and states"] = not unequal
    rows, again = _rows(whole), _rows(broken)
    verdict.compared[f"metrics: {len(rows)} rows"] = rows == again
    for row, other in zip(rows, again, strict=False):
        if row != other:
            keys = [key for key in {**row, **other} if row.get(key) != other.get(key)]
            verdict.differences.append(
                f"metrics.jsonl, step {row.get('step')}: "
                + ", ".join(f"{key} {row.get(key)} and {other.get(key)}" for key in keys)
            )
    if len(rows) != len(again):
        verdict.differences.append(f"metrics.jsonl: {len(rows)} rows and {len(again)}")
    verdict.is_same = all(verdict.compared.values())


def _digests(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.rglob("*")):
        if path.suffix in _STATES:
            name = path.relative_to(folder).as_posix()
            yield name, hash_file(path, name).sha256


def _rows(run: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if not any(w in key for w in _BY_THE_CLOCK)}
        for row in read_metrics(run / "metrics.jsonl")
    ]


def _explained(one: Path, other: Path) -> str:
    name = f"{one.parent.name}/{one.name}"
    if not (one.is_file() and other.is_file()):
        return f"{name}: only one of the runs has it"
    if one.suffix != ".safetensors":
        return f"{name}: other bytes"
    from safetensors.torch import load_file

    before, after = load_file(one), load_file(other)
    worst = max(
        (float((before[key].double() - after[key].double()).abs().max()), key)
        for key in before
        if key in after and before[key].shape == after[key].shape and before[key].numel()
    )
    unequal = sum(not (k in after and before[k].equal(after[k])) for k in before)
    return f"{name}: {unequal} of {len(before)} tensors; at most by {worst[0]:.3g} ({worst[1]})"
