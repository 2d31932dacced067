"""``trainkit eval``: benchmarks of a trained model."""

import functools
import json
from dataclasses import replace
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainkit.cli import answering as shared
from trainkit.cli.app import without_collection
from trainkit.cli.arguments import BaseModel, TrustRemoteCode
from trainkit.cli.output import echo
from trainkit.errors import RecipeError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainkit.evals.scores import Evaluation
    from trainkit.infer.locate import ModelPaths


class Switch(str, Enum):
    """On or off."""

    on = "on"
    off = "off"


class Backend(str, Enum):
    """What runs the model."""

    transformers = "transformers"
    vllm = "vllm"


Tasks = Annotated[
    str,
    typer.Option(
        help="Names with commas between: boolq, mmlu, gsm8k, humaneval, agieval, bbh, ceval, a "
        "part of one (mmlu_anatomy), or any task of lm-evaluation-harness."
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        help="A directory with the sets' files, a folder for each set; without it they come "
        "from the hub."
    ),
]
Limit = Annotated[int | None, typer.Option(min=1, help="Ask only so many questions of each task.")]
Shots = Annotated[
    int | None,
    typer.Option(min=0, help="Examples before each question; by default as the set has it."),
]
ChatTemplate = Annotated[
    bool | None,
    typer.Option(
        "--chat-template/--no-chat-template",
        help="Ask with the chat template; by default where the model was trained with one.",
    ),
]
Thinking = Annotated[
    Switch | None,
    typer.Option(help="Switch thoughts on or off, where the chat template can."),
]
AllowCode = Annotated[
    bool,
    typer.Option("--allow-code", help="Run the programs that the model writes (humaneval)."),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help="Where to write; by default eval/ of the run, or eval/ here."
    ),
]
BatchSize = Annotated[
    int | None, typer.Option(min=1, help="Rows at once; by default as memory has it.")
]
MaxNewTokens = Annotated[
    int | None, typer.Option(min=1, help="Longest answer; by default as the task has it.")
]
Kernels = Annotated[
    bool, typer.Option("--kernels/--no-kernels", help="Use trainkit's kernels on a GPU.")
]
BackendOption = Annotated[Backend, typer.Option(help="What runs the model.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON lines, one a score.")]


def evaluate(
    context: typer.Context,
    model: shared.Model,
    tasks: Tasks,
    data: Data = None,
    limit: Limit = None,
    shots: Shots = None,
    chat_template: ChatTemplate = None,
    thinking: Thinking = None,
    allow_code: AllowCode = False,
    output: Output = None,
    batch_size: BatchSize = None,
    max_new_tokens: MaxNewTokens = None,
    kernels: Kernels = True,
    backend: BackendOption = Backend.transformers,
    adapter: shared.Adapter = None,
    base_model: BaseModel = None,
    trusted: TrustRemoteCode = False,
    dtype: shared.DtypeOption = shared.LoadDtype.auto,
    device: shared.Device = "auto",
    any_base: shared.AnyBase = False,
    verify: shared.Verify = True,
    as_json: AsJson = False,
) -> None:
    """Ask a model the questions of benchmarks, and keep scores and samples.

    Several GPUs of this host share the questions. HumanEval runs what the model writes, and needs
    --allow-code.
    """
    from trainkit.evals.scores import check_free, earlier
    from trainkit.infer import benchmark
    from trainkit.infer.locate import find_model

    benchmark.check_harness()
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise RecipeError("there is no task in it", where="--tasks", fix="--tasks boolq,mmlu")
    paths = find_model(model, adapter=adapter, base_model=base_model, trust_remote_code=trusted)
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    target = benchmark.target_of(output, paths, stamp)
    asking = benchmark.Asking(
        chat_template,
        None if thinking is None else thinking is Switch.on,
        batch_size,
        max_new_tokens,
        kernels,
    )
    choice = {
        "data": None if data is None else str(data),
        "limit": limit,
        "shots": shots,
        "allow_code": allow_code,
    }
    question = {
        "tasks": names, **choice, "backend": backend.value, "dtype": dtype.value,
        "chat_template": chat_template, **benchmark.settings_of(paths, asking),
    }  # fmt: skip
    known = earlier(target, question)
    if known is not None and question["weights"] is not None:
        echo(f"{target} has these scores from an earlier call", err=True)
        _tell(paths, target, *known, as_json=as_json)
        return
    check_free(target)
    if backend is Backend.transformers:
        benchmark.on_all_gpus(list(context.obj or ()), device)
    with without_collection():
        ask = _ready(
            paths, asking, {"tasks": names, **choice}, backend, dtype, device,
            shared.Trust(verify, any_base),
        )  # fmt: skip
    found = ask()
    if found is None:
        return  # not the first rank
    replace(found, settings={**found.settings, "asked": question}).write(target)
    _tell(paths, target, found.scores, found.notes, as_json=as_json)


def _tell(
    paths: "ModelPaths", target: Path, scores: Any, notes: "Sequence[str]", *, as_json: bool
) -> None:
    """Put the scores into the run's report, and print them."""
    from trainkit.evals.scores import as_lines

    _into_the_report(paths)
    for score in scores if as_json else ():
        echo(json.dumps(found_row(score, target), ensure_ascii=False))
    if not as_json:
        for line in as_lines(scores):
            echo(line)
    for note in notes:
        echo(note, err=True)
    if not as_json:
        echo(str(target))


def found_row(score: Any, target: Path) -> dict[str, Any]:
    """A score as programs read it."""
    from dataclasses import asdict

    return {**asdict(score), "output": str(target)}


def _ready(
    paths: "ModelPaths",
    asking: Any,
    choice: dict[str, Any],
    backend: Backend,
    dtype: shared.LoadDtype,
    device: str,
    trust: shared.Trust,
) -> "Callable[[], Evaluation | None]":
    """A function that asks the loaded model, and gives None on all ranks but the first.

    Questions first, since they are cheap to refuse; then the model.
    """
    from trainkit.train.log.quiet import quieten_libraries

    quieten_libraries()  # first: some libraries speak when they are imported
    from trainkit.evals.run import evaluate_model
    from trainkit.evals.tasks import TaskChoice, load_tasks
    from trainkit.infer import benchmark
    from trainkit.parallel import ProcessRank

    process = ProcessRank.from_environment()
    wanted = TaskChoice(**choice)
    tasks = load_tasks(wanted)
    benchmark.check_thinking(asking, tasks)
    if backend is Backend.vllm:
        from trainkit.infer.vllm_backend import vllm_model

        model, chat, ranks, is_patched = *vllm_model(paths, asking, dtype.value), None, False
    else:
        ranks = benchmark.start_ranks(process)
        held = shared.Held(dtype, shared.Base.auto, benchmark.rank_device(device, process))
        engine = shared.load(paths, held, None, trust)
        chat = benchmark.uses_chat(asking, paths, engine.tokenizer)
        is_patched = asking.kernels and benchmark.patch(engine, lambda line: _note(line, process))
        model = benchmark.harness_model(engine, asking, chat=chat, ranks=ranks)
    _note(f"chat template: {'on' if chat else 'off'}", process)
    settings = benchmark.settings_of(
        paths, asking, shots=wanted.shots, backend=backend.value, dtype=dtype.value,
        kernels=is_patched, processes=process.world_size,
    )  # fmt: skip
    return functools.partial(
        evaluate_model,
        model,
        tasks,
        limit=wanted.limit,
        chat=chat,
        settings=settings,
        gather=ranks.gather if ranks is not None else None,
    )


def _note(line: str, process: Any) -> None:
    if process.is_main:
        echo(line, err=True)


def _into_the_report(paths: "ModelPaths") -> None:
    """Write a finished run's report again."""
    from trainkit.run import RunDirectory
    from trainkit.run.report.html import write_report

    if paths.run is not None and (paths.run / "report.html").is_file():
        write_report(RunDirectory.open(paths.run))
