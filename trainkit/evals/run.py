"""An evaluation: the harness asks a model the questions of tasks, and what comes back is kept."""

import functools
import hashlib
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import lm_eval.evaluator
import lm_eval.utils

from trainkit.errors import RecipeError
from trainkit.evals.model import PromptRecord
from trainkit.evals.scores import Evaluation, Score, finite
from trainkit.evals.tasks import BenchmarkSet, LoadedTasks, quiet_harness, set_of
from trainkit.options.training import METRICS


def evaluate_model(
    model: Any,
    tasks: LoadedTasks,
    *,
    limit: int | None,
    chat: bool,
    settings: Mapping[str, Any],
    gather: Any = None,
) -> Evaluation | None:
    """Ask all questions of the tasks; every rank calls it."""
    started = time.perf_counter()
    for task in tasks.tasks.values():
        if not hasattr(task, "_build_all_requests"):
            task._build_all_requests = task.build_all_requests
        task.build_all_requests = functools.partial(_build, model, task)
    with quiet_harness(), templates_compiled_once():
        found = lm_eval.evaluator.evaluate(
            lm=model,
            task_dict=dict(tasks.loaded),
            limit=limit,
            bootstrap_iters=1000,
            log_samples=True,
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,
            confirm_run_unsafe_code=True,  # refused before, where nobody allowed it
        )
    everyone = gather or (lambda value: [value])
    records = everyone(model.record.hashes)
    written = everyone(model.written)
    truncated = sum(everyone(model.num_truncated))
    if found is None:
        return None
    prompts = PromptRecord.joined(records)
    answers = {key: each for part in written for key, each in part.items()}
    samples: dict[str, list[dict[str, Any]]] = {}
    for task, rows in found["samples"].items():
        for row in sorted(rows, key=lambda row: int(row["doc_id"])):
            kept = {key: value for key, value in row.items() if key != "metrics"}
            if own := answers.get((task, row["doc_id"])):
                kept["written"] = own  # the whole text, which the harness does not see
            samples.setdefault(task, []).append(kept)
    unfinished = sum(not each["is_whole"] for own in answers.values() for each in own)
    notes = []
    if truncated:
        notes.append(f"{truncated} prompts lost their beginning: the context is too short for them")
    if unfinished:
        notes.append(f"{unfinished} of {len(answers)} answers were cut off before their end")
    return Evaluation(
        scores=list(_scores(found, tasks, prompts)),
        samples=samples,
        settings={
            **settings,
            "chat_template": chat,
            "limit": limit,
            "seconds": round(time.perf_counter() - started, 3),
            "versions": {name: version(name) for name in ("lm_eval", "transformers", "torch")},
        },
        notes=notes,
    )


def figure_names(tasks: LoadedTasks) -> list[str]:
    """The figures that an evaluation of these tasks has: task as it was given, and metric."""
    names = []
    for given, spec in tasks.names.items():
        group = (tasks.loaded.get("groups") or {}).get(spec)
        if group is None:
            own = tasks.tasks.get(spec)
            members = [] if own is None else [own]
            metrics = set() if own is None else set(own.aggregation())
        else:
            members = group.get_all_tasks()
            metrics = {each.metric for each in group.aggregate_metric_list or ()}
        kinds = {each.name for task in members for each in task._filters}
        row = set_of(spec)
        names += [
            f"{given}/{_figure(row, metric, kind, len(kinds) > 1)}"
            for metric in sorted(metrics)
            for kind in sorted(kinds)
        ]
    return names


def _figure(row: BenchmarkSet | None, metric: str, kind: str, several: bool) -> str:
    """The name of a figure: its metric, and its filter where that tells it from others.

    A filter does where a task has several, or the table says so.
    """
    known = () if row is None else METRICS[row.name]
    is_named = several or any(each.endswith(f"/{kind}") for each in known)
    return f"{metric}/{kind}" if kind != "none" and is_named else metric


@contextmanager
def templates_compiled_once() -> Iterator[None]:
    """Within, the harness compiles a task's template once, and not for every question again.

    Of short questions that took longer than everything else except the model.
    """
    environment = lm_eval.utils.env
    environment.from_string = functools.cache(environment.from_string)
    try:
        yield
    finally:
        del environment.from_string  # of the instance; its class has the method


def _build(model: Any, task: Any, *, rank: int, world_size: int, **options: Any) -> None:
    """This rank's share of a task's questions.

    All are built first: examples are drawn one question after the other, so a rank that left out
    the others' would ask its own with other examples than a single process does.
    """
    model.prepare_for(task)
    task._build_all_requests(rank=0, world_size=1, **options)
    task._instances = [each for each in task._instances if each.doc_id % world_size == rank]
    if not task._instances:
        raise RecipeError(
            f"{task.config.task} has fewer questions than there are processes ({world_size})",
            where=f"task {task.config.task}",
            fix="raise --limit, or start fewer: CUDA_VISIBLE_DEVICES=0",
        )


def _scores(
    found: Mapping[str, Any], tasks: LoadedTasks, prompts: Mapping[str, str]
) -> Iterator[Score]:
    chosen = set(tasks.names.values())
    groups = found.get("groups") or {}
    order = [*groups, *(name for name in found["results"] if name not in groups)]
    parts = {each for own in found.get("group_subtasks", {}).values() for each in own}
    for task in order:
        figures = groups.get(task) or found["results"][task]
        row = set_of(task)
        below = _tasks_below(found, task)
        known, hashed = found["versions"].get(task), prompts.get(task)
        if hashed is None and below:
            lines = [f"{name} {prompts.get(name)}" for name in sorted(below)]
            hashed = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        several = len({key.partition(",")[2] for key in figures if "," in key}) > 1
        for key, value in figures.items():
            metric, comma, kind = key.partition(",")
            score = finite(value)
            if not comma or metric.endswith("_stderr") or score is None:
                continue
            name = _figure(row, metric, kind, several)
            yield Score(
                task=task,
                metric=name,
                value=score,
                stderr=finite(figures.get(f"{metric}_stderr,{kind}")),
                shots=found["n-shot"].get(task),
                version=None if known is None else str(known),
                num_samples=sum(each["effective"] for each in below.values()),
                num_all=sum(each["original"] for each in below.values()),
                prompts=hashed,
                parts=sorted(below) if task not in below else (),
                is_part=task not in chosen and task in parts,
                expected=row.expected if row is not None else {},
                is_main=row is not None and name == row.metric,
            )


def _tasks_below(found: Mapping[str, Any], group: str) -> dict[str, Mapping[str, int]]:
    counts: dict[str, Mapping[str, int]] = {}
    seen, waiting = set(), [group]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in found["n-samples"]:
            counts[name] = found["n-samples"][name]
        waiting += found["group_subtasks"].get(name, ())
    return counts
