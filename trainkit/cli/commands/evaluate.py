"""``trainkit eval``: benchmarks of a trained model."""

from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trainkit.cli.commands.chat import load
from trainkit.cli.options import Held, JsonLines, ModelChoice, echo, expanded, note, tell
from trainkit.cli.quick_imports import without_collection
from trainkit.errors import RecipeError, RunDirectoryError

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainkit.evals.scores import Evaluation
    from trainkit.infer.locate import ModelPaths


@dataclass(frozen=True)
class Questions:
    """The questions, and the form they take."""

    tasks: Annotated[
        str,
        typer.Option(
            help="Names with commas between: boolq, mmlu, gsm8k, humaneval, agieval, bbh, ceval, "
            "a part of one (mmlu_anatomy), any task of lm-evaluation-harness, or files of rows as "
            "for training, with images or without: charts.jsonl."
        ),
    ]
    data: Annotated[
        Path | None,
        typer.Option(
            help="A directory with the sets' files, a folder for each set; without it they come "
            "from the hub."
        ),
    ] = None
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Ask only so many questions of each task; each answer of a conversation is one.",
        ),
    ] = None
    shots: Annotated[
        int | None,
        typer.Option(min=0, help="Examples before each question; by default as the set has it."),
    ] = None
    chat_template: Annotated[
        bool | None,
        typer.Option(
            "--chat-template/--no-chat-template",
            help="Ask with the chat template; by default where the model was trained with one.",
        ),
    ] = None
    thinking: Annotated[
        Literal["on", "off"] | None,
        typer.Option(help="Switch thoughts on or off, where the chat template can."),
    ] = None
    allow_code: Annotated[
        bool,
        typer.Option("--allow-code", help="Run the programs that the model writes (humaneval)."),
    ] = False

    def choice(self) -> dict[str, Any]:
        """As a recipe has them."""
        names = [name.strip() for name in self.tasks.split(",") if name.strip()]
        if not names:
            raise RecipeError("there is no task in it", where="--tasks", fix="--tasks boolq,mmlu")
        data = None if self.data is None else str(self.data)
        own = {"limit": self.limit, "shots": self.shots, "allow_code": self.allow_code}
        return {"tasks": names, "data": data, **own}


@expanded
def evaluate(
    context: typer.Context,
    *,
    questions: Questions,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Where to write; by default eval/ of the run, or eval/ here."
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Rows at once; by default as memory has it.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer; by default as the task has it.")
    ] = None,
    kernels: Annotated[
        bool, typer.Option("--kernels/--no-kernels", help="Use trainkit's kernels on a GPU.")
    ] = True,
    backend: Annotated[
        Literal["transformers", "vllm"], typer.Option(help="What runs the model.")
    ] = "transformers",
    source: ModelChoice,
    held: Held,
    as_json: JsonLines = False,
) -> None:
    """Ask a model the questions of benchmarks, and keep scores and samples.

    Several GPUs of this host share the questions. HumanEval runs what the model writes, and needs
    --allow-code.
    """
    from trainkit.data.files import is_data
    from trainkit.evals.scores import as_lines, check_free
    from trainkit.infer import benchmark
    from trainkit.run import RunDirectory
    from trainkit.run.report import write_report

    choice = questions.choice()
    files = [name for name in choice["tasks"] if is_data(Path(name))]
    if len(files) < len(choice["tasks"]):
        benchmark.check_harness()
    paths = source.find()
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    target = benchmark.target_of(output, paths, stamp)
    asking = benchmark.Asking(
        questions.chat_template,
        None if questions.thinking is None else questions.thinking == "on",
        batch_size,
        max_new_tokens,
        kernels,
    )
    check_free(target)
    if files:
        _refuse_of_files(files[0], questions, backend)
    if backend == "transformers":
        benchmark.on_all_gpus(list(context.obj or ()), held.device)
    with without_collection():
        ask = _ready(paths, asking, choice, backend, held)
    found = ask()
    if found is None:
        return  # not the first rank

    def draw() -> None:
        if paths.run is not None and (paths.run / "report.html").is_file():
            try:
                write_report(RunDirectory.open(paths.run))
            except RunDirectoryError as error:  # the scores are worth more
                note(f"report.html stays as it was: {error}")

    wanted, target = target, found.write(target, draw)
    if target != wanted:
        note(f"something has come to {wanted} meanwhile; the scores are in {target}")
    for score in found.scores if as_json else ():
        tell({**asdict(score), "output": str(target)}, as_json)
    for line in () if as_json else as_lines(found.scores):
        echo(line)
    for line in found.notes:
        note(line)
    if not as_json:
        echo(str(target))


def _refuse_of_files(name: str, questions: Questions, backend: str) -> None:
    """Refuse options that do not act on files of rows, which are asked as training has them."""
    given = {
        "--shots": questions.shots is not None,
        "--thinking": questions.thinking is not None,
        "--no-chat-template": questions.chat_template is False,
        "--backend vllm": backend == "vllm",
    }
    for option, is_given in given.items():
        if is_given:
            raise RecipeError(
                f"it does not act on the rows of {name}, which are asked as they were trained",
                where=option,
                fix="leave it out, or evaluate the file by itself",
            )


def _ready(
    paths: "ModelPaths", asking: Any, choice: dict[str, Any], backend: str, held: Held
) -> "Callable[[], Evaluation | None]":
    """A function that asks the loaded model, and gives None on all ranks but the first.

    Questions first, since they are cheap to refuse; then the model.
    """
    from trainkit.train.quiet import quieten_libraries

    quieten_libraries()  # first: some libraries speak when they are imported
    from trainkit.data.files import is_data
    from trainkit.evals.scores import Evaluation, Ranks
    from trainkit.infer import benchmark
    from trainkit.infer.engine import prove_base, verify_files
    from trainkit.parallel import ProcessRank

    process = ProcessRank.from_environment()

    def say(line: str) -> None:
        if process.is_main:
            note(line)

    tasks, limit = None, choice["limit"]
    engine: Any = None
    files = [name for name in choice["tasks"] if is_data(Path(name))]
    others = [name for name in choice["tasks"] if name not in files]
    if others:
        from trainkit.evals.run import evaluate_model
        from trainkit.evals.tasks import TaskChoice, load_tasks

        tasks = load_tasks(TaskChoice(**{**choice, "tasks": others}))
        benchmark.check_thinking(asking, tasks)
    if held.verify:
        verify_files(paths, say)
    rows = benchmark.read_files(files, paths, limit) if files else {}
    if backend == "vllm":
        from trainkit.infer.vllm_backend import vllm_model

        if paths.adapter is not None:
            prove_base(paths.adapter, paths.source, say, any_base=held.any_base)
        model, chat = vllm_model(paths, asking, held.dtype)
        ranks, is_patched = Ranks(), False
    else:
        ranks = benchmark.start_ranks(process)
        device = benchmark.rank_device(held.device, process)
        own = replace(held, device=device, verify=False)  # it was
        engine = load(paths, own, None)
        chat = not tasks or benchmark.uses_chat(asking, paths, engine.tokenizer)
        is_patched = asking.kernels and benchmark.patch(engine, say)
        model = tasks and benchmark.harness_model(engine, asking, chat=chat, ranks=ranks)
    say(f"chat template: {'on' if chat else 'off'}")
    settings = benchmark.settings_of(
        paths, asking, shots=choice["shots"], backend=backend, dtype=held.dtype,
        kernels=is_patched, processes=process.world_size,
    )  # fmt: skip

    def ask() -> "Evaluation | None":
        found: list[Any] = []
        if rows:
            own = {**settings, "chat_template": True, "limit": limit}
            found.append(benchmark.evaluate_files(engine, rows, asking, ranks, own))
        if tasks is not None:
            how = {"limit": limit, "chat": chat, "settings": settings, "gather": ranks.gather}
            found.append(evaluate_model(model, tasks, **how))
        return Evaluation.joined(found) if process.is_main else None

    return ask
