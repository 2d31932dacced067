"""What is read of a run to compare it: recipe, curve, speed, memory, answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from trainkit.data.options import BUFFER
from trainkit.errors import RunDirectoryError
from trainkit.options import DistillOptions, Fp8Options, PreferenceOptions
from trainkit.options.parallel import WORDS
from trainkit.options.training import DEFAULT_BETA, SIMPO_BETA
from trainkit.run.files import read_record
from trainkit.run.metrics import as_float, judged_figures, read_scores
from trainkit.run.plot import read_rows, seconds_spent
from trainkit.run.status import read_status

SEED_KEYS = ("training.seed", "training.data_seed")
"""Keys in which repetitions of one recipe differ."""

NUM_RANKS = "num_ranks"
"""No key of a recipe: how many processes a run was started with."""

_ALL_ROWS = "global_batch_size"
_ROWS_OF_A_STEP = (
    "training.per_device_train_batch_size",
    "training.gradient_accumulation_steps",
    NUM_RANKS,
)
"""What decides the rows of a step where the global number is not set."""

_NOT_ABOUT_TRAINING = (
    "name",
    "faults",
    "data.cache_dir",
    "data.num_workers",
    *(
        f"training.{key}"
        for key in (
            "output_dir", "run_name", "project", "report_to", "disable_tqdm", "log_level",
            "log_level_replica", "log_on_each_node", "logging_dir", "logging_first_step",
            "logging_nan_inf_filter", "logging_steps", "logging_strategy", "save_on_each_node",
            "save_steps", "save_strategy", "save_total_limit", "push_to_hub", "hub_model_id",
            "hub_strategy", "hub_private_repo", "hub_always_push", "hub_revision",
            "dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor",
            "dataloader_persistent_workers", "trackio_space_id",
        )
    ),
)  # fmt: skip
"""Keys, and sections, that decide where a run goes and what is kept of it, but not its curve."""

_CLOCK = ("step_seconds", "tokens_per_second", "data_seconds")


@dataclass(frozen=True)
class ComparedRun:
    """A run as it is compared.

    Attributes:
        values: the recipe's resolved values by dotted key; empty where they are not recorded.
        begun: the clock's figures of its first row, which no other run has; None without any.
        data_digest: what tells one prepared data set from another; None where it is not recorded.
        answers: whether each held-out question was answered right, by question.
        held_out: what else the objective has measured in its last evaluation, and its interval.
    """

    path: Path
    values: Mapping[str, Any]
    losses: Mapping[int, float]
    eval_losses: Mapping[int, float]
    tokens_per_second: float | None
    peak_memory_gib: float | None
    steps: int
    step_seconds: float
    data_digest: str | None
    begun: str | None = None
    answers: Mapping[str, bool] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    scores: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    held_out: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def last_eval_loss(self) -> float | None:
        return self.eval_losses[max(self.eval_losses)] if self.eval_losses else None

    def losses_up_to(self, ends: Sequence[int]) -> list[float]:
        """The means of the steps up to each: a row is that of every step since the one before."""
        found, rows, before = list[float](), iter(sorted(self.losses.items())), 0
        for end in ends:
            total, start, step = 0.0, before, before
            while step < end:
                step, loss = next(rows)
                total += loss * (step - before)
                before = step
            found.append(total / (end - start))
        return found

    def summary(self) -> dict[str, Any]:
        right = sum(self.answers.values())
        return {
            "run": str(self.path),
            "steps": self.steps,
            "last_loss": self.losses[max(self.losses)] if self.losses else None,
            "last_eval_loss": self.last_eval_loss,
            "tokens_per_second": self.tokens_per_second,
            "peak_memory_gib": self.peak_memory_gib,
            "step_seconds": self.step_seconds,
            "accuracy": right / len(self.answers) if self.answers else None,
            "held_out": {name: value for name, (value, *_) in self.held_out.items()},
            "scores": {name: score["value"] for name, score in self.scores.items()},
        }


def read_run(path: Path, values: Mapping[str, Any]) -> ComparedRun:
    rows = read_rows(path)
    trained = [row for row in rows if as_float(row.get("loss")) is not None]

    def numbers(key: str, among: Sequence[Mapping[str, Any]]) -> dict[int, float]:
        """By step; a row may have something else there, or nothing."""
        found = {row["step"]: as_float(row.get(key)) for row in among}
        return {step: value for step, value in found.items() if value is not None}

    if not trained:
        raise RunDirectoryError(
            "this run has logged no training steps to compare", where=str(path), fix="leave it out"
        )
    settled = trained[len(trained) // 2 :]
    speeds = [speed for speed in numbers("tokens_per_second", settled).values() if speed]
    answers, texts = _answers(path)
    timed = numbers("step_seconds", trained)
    # Nothing says on how many ranks a run trained where it was one.
    num_ranks = read_record(
        path / "environment.json", lambda each: int(each["variables"].get("WORLD_SIZE", 1)), 1
    )
    data: dict[str, Any] = read_record(
        path / "data.json", lambda each: {"train": {**each["train"]}, **each}, {}
    )
    files = _files_of(data)
    clock = [trained[0].get(key) for key in _CLOCK]
    known = [row["step"] for row in rows] + [read_status(path / "status.json").last_step or 0]
    beside = {*_NOT_ABOUT_TRAINING}
    about = {k: each for k, each in values.items() if not {k, k.partition(".")[0]} & beside}
    return ComparedRun(
        path=path,
        values={**about, NUM_RANKS: num_ranks},
        losses=numbers("loss", trained),
        eval_losses=numbers("eval_loss", rows),
        tokens_per_second=median(speeds) if speeds else None,
        peak_memory_gib=max(numbers("peak_memory_gib", trained).values(), default=0.0) or None,
        steps=max(known),
        step_seconds=seconds_spent([*timed], [*timed.values()])[-1] if timed else 0.0,
        begun=None if None in clock else repr([*clock, trained[0]["loss"]]),
        data_digest=json.dumps(sorted(files)) if files else None,
        answers=answers,
        texts=texts,
        held_out=judged_figures(rows),
        scores={f"{row['task']}/{row['metric']}": row for row in read_scores(path)},
    )


def spelt_out(values: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's values, with the defaults of sections left out, and long forms for short ones."""
    spelt = dict(values)
    for name, section in (("preference", PreferenceOptions), ("distill", DistillOptions)):
        spelt[name] = section().model_dump() | (values.get(name) or {})
    if spelt["preference"]["beta"] is None:
        is_simpo = values.get("objective") == "simpo"
        spelt["preference"]["beta"] = SIMPO_BETA if is_simpo else DEFAULT_BETA
    if recomputed := WORDS.get(str(values.get("recompute"))):
        spelt["recompute"] = recomputed.model_dump()
    if isinstance(kernels := values.get("kernels"), Mapping):
        spelt["kernels"] = {op: is_on for op, is_on in kernels.items() if not is_on} or True
    fp8 = (values.get("model") or {}).get("fp8")
    if fp8 and (options := None if isinstance(fp8, Mapping) else Fp8Options.of(fp8)):
        spelt["model"] = {**values["model"], "fp8": options.model_dump(exclude_defaults=True)}
    if (values.get("data") or {}).get("streaming") is True:
        spelt["data"] = {**values["data"], "streaming": BUFFER}
    return spelt


def one_of_each(runs: Sequence[ComparedRun]) -> tuple[list[ComparedRun], list[str]]:
    """A run and copies of it, continued or not, are one: the one that came furthest.

    Two that went on otherwise from one beginning are two.
    """
    further = sorted(range(len(runs)), key=lambda number: -runs[number].steps)
    kept: list[int] = []
    notes: dict[int, str] = {}
    for number in further:
        run = runs[number]
        whole = next((runs[each] for each in kept if _goes_on(runs[each], run)), None)
        if whole is None:
            kept.append(number)
        else:
            notes[number] = (
                f"{run.path} is the run {whole.path} up to step {run.steps}: one run, and not two"
            )
    return [runs[number] for number in sorted(kept)], [notes[number] for number in sorted(notes)]


def _goes_on(whole: ComparedRun, run: ComparedRun) -> bool:
    """Whether a run has the steps of another, and maybe more."""
    begins = whole.begun is not None and whole.begun == run.begun
    return begins and all(whole.losses.get(step, loss) == loss for step, loss in run.losses.items())


def differing_keys(runs: Sequence[ComparedRun]) -> dict[str, list[Any]]:
    """Keys whose values are not the same in all runs, with each run's value."""
    keys = dict.fromkeys(key for run in runs for key in run.values)
    rows = {key: [run.values.get(key) for run in runs] for key in keys}
    return {key: row for key, row in rows.items() if any(value != row[0] for value in row)}


def group_by_recipe(runs: Sequence[ComparedRun]) -> list[list[ComparedRun]]:
    """Runs whose recipes differ in nothing but the seed belong together."""
    groups: dict[str, list[ComparedRun]] = {}
    for run in runs:
        passed_over = SEED_KEYS if run.values.get(_ALL_ROWS) is None else (*SEED_KEYS, NUM_RANKS)
        settled = {key: value for key, value in run.values.items() if key not in passed_over}
        groups.setdefault(json.dumps(settled, sort_keys=True, default=str), []).append(run)
    return list(groups.values())


def without_repeats(runs: Sequence[ComparedRun]) -> list[ComparedRun]:
    """One run of each seed: the same seed again gives the same numbers, and is no new chance."""
    found: dict[str, ComparedRun] = {}
    for run in runs:
        found.setdefault(repr([run.values.get(key) for key in SEED_KEYS]), run)
    return list(found.values())


def saw_the_same_batches(first: ComparedRun, second: ComparedRun) -> bool:
    """Whether the two were trained on the same rows in the same order."""
    keys = [*SEED_KEYS, _ALL_ROWS, "data.max_length", "data.packing"]
    if first.values.get(_ALL_ROWS) is None:
        keys += _ROWS_OF_A_STEP
    same_keys = all(first.values.get(key) == second.values.get(key) for key in keys)
    return same_keys and first.data_digest is not None and first.data_digest == second.data_digest


def _files_of(content: Any) -> list[str]:
    if isinstance(content, dict):
        own = [str(content["sha256"])] if isinstance(content.get("sha256"), str) else []
        return own + [each for value in content.values() for each in _files_of(value)]
    if isinstance(content, list):
        return [each for value in content for each in _files_of(value)]
    return []


def _answers(path: Path) -> tuple[dict[str, bool], dict[str, str]]:
    """The answers of ``generation_eval``, by conversation and turn."""

    def read(content: Any) -> tuple[dict[str, bool], dict[str, str]]:
        named = {
            f"{row['conversation']}.{row['turn']} {row['question']}": row for row in content["rows"]
        }
        right = {name: bool(row["is_exact"]) for name, row in named.items()}
        return right, {name: str(row["given"]) for name, row in named.items()}

    nothing = dict[str, bool](), dict[str, str]()
    return read_record(path / "generation_eval.json", read, nothing)
