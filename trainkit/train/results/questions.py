"""The questions that a model is asked while it trains: held-out conversations and benchmarks."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate.utils import gather_object
from torch import nn

from trainkit.errors import RecipeError
from trainkit.estimate.context import context_of
from trainkit.evals.metrics import answer_metrics
from trainkit.options import TaskOptions
from trainkit.options.benchmarks import METRICS
from trainkit.options.evaluation import ANSWERS
from trainkit.recipe.rules import metric_of
from trainkit.train.data.run_data import read_conversations
from trainkit.train.hooks import LoopState
from trainkit.train.results.evaluations import Measurement
from trainkit.train.results.generation_eval import GenerationEvalResult, evaluate_answers
from trainkit.train.run import Run

if TYPE_CHECKING:
    from trainkit.evals.tasks import LoadedTasks

DEFAULT_CONTEXT = 2048


def measurements(run: Run) -> list[Measurement]:
    """What the loop measures every so many steps."""
    generation, tasks = run.recipe.generation_eval, run.recipe.eval_tasks
    rows = []
    if generation is not None and generation.every is not None:
        rows.append(Measurement(generation.every, _answers))
    if tasks is not None:
        rows.append(Measurement(tasks.every, _scores))
    return rows


def answer(loop: LoopState, model: nn.Module) -> GenerationEvalResult:
    """Answer the held-out conversations; every rank takes a share, and has all answers then."""
    run, ranks, generation = loop.run, loop.ranks, loop.run.recipe.generation_eval
    assert generation is not None
    result = evaluate_answers(
        model,
        run.tokenizer,
        run.held_out[ranks.process_index :: ranks.num_processes],
        max_new_tokens=generation.max_new_tokens,
        batch_size=generation.batch_size,
        stop_token_ids=run.data.stop_token_ids,
        options=run.data_options,
        metrics=run.metrics,
    )
    if ranks.num_processes == 1:
        return result
    return GenerationEvalResult.merge(gather_object([result]))


def _answers(loop: LoopState) -> Mapping[str, float]:
    with loop.sharing():
        result = answer(loop, loop.model)
    return {f"{ANSWERS}/{name}": value for name, value in result.means.items()}


def _scores(loop: LoopState) -> Mapping[str, float]:
    from trainkit.evals.model import PromptStyle, TrainedModel
    from trainkit.evals.model import Ranks as EvalRanks
    from trainkit.evals.run import evaluate_model

    run, tasks, loaded = loop.run, loop.run.recipe.eval_tasks, loop.run.tasks
    assert tasks is not None
    assert loaded is not None
    tokenizer, model, size = run.tokenizer, loop.model, loop.ranks.num_processes
    chat = bool(tokenizer.chat_template) if tasks.chat_template is None else tasks.chat_template
    gather = (lambda value: gather_object([value])) if size > 1 else (lambda value: [value])
    trained = TrainedModel(
        model,
        PromptStyle(tokenizer, run.data_options, chat=chat),
        stop_ids=run.data.stop_token_ids or [tokenizer.eos_token_id],
        max_length=context_of(model.config.to_dict()) or DEFAULT_CONTEXT,
        # Attention in training need not know a cache that several rows share.
        shares_beginnings=False,
        ranks=EvalRanks(loop.ranks.process_index, size, gather),
    )
    with loop.sharing():
        found = evaluate_model(
            trained, loaded, limit=tasks.limit, chat=chat, settings={}, gather=gather
        )
    given = {spec: name for name, spec in loaded.names.items()}
    scores = [] if found is None else [each for each in found.scores if each.task in given]
    figures = {f"{given[score.task]}/{score.metric}": score.value for score in scores}
    result: Mapping[str, float] = gather(figures)[0]
    return result


def load_questions(run: Run, ledger: Path) -> None:
    """Read everything that is asked, so that what is wrong is said before the model is loaded.

    Raises:
        TrainkitError: a metric or a task cannot be used.
    """
    generation, tasks = run.recipe.generation_eval, run.recipe.eval_tasks
    every = None if generation is None else generation.every
    if not run.layout.engine.holds_whole_model and (tasks is not None or every is not None):
        raise RecipeError(
            "no process holds the whole model, so none can answer questions of its own",
            where="eval_tasks" if tasks is not None else "generation_eval.every",
            fix="remove it; `trainkit eval` measures checkpoints",
        )
    if generation is not None:
        sources = run.recipe.data.with_format(generation.data)
        conversations, num_dropped = read_conversations(sources, ledger)
        if num_dropped:
            run.console.warn(f"{num_dropped} held-out rows are not conversations and were skipped")
        run.held_out = conversations[: generation.max_samples]
        references = [
            message.content
            for conversation in run.held_out
            for message in conversation.messages
            if message.role == "assistant" and not message.tool_calls
        ]
        run.metrics = answer_metrics(generation.metrics, references, run.console.warn)
    if tasks is not None:
        run.tasks = _load_tasks(tasks, metric_of(run.recipe.training))


def _load_tasks(tasks: TaskOptions, metric: str | None) -> "LoadedTasks":
    if find_spec("lm_eval") is None:
        raise RecipeError(
            "lm-evaluation-harness is not installed",
            where="eval_tasks",
            fix="pip install 'trainkit[eval]', or remove eval_tasks",
        )
    from trainkit.evals.run import figure_names
    from trainkit.evals.tasks import load_tasks

    loaded = load_tasks(tasks)
    task = "" if metric is None else metric.partition("/")[0]
    if task in tasks.tasks and task not in METRICS:  # of those that are known, the recipe was read
        names = figure_names(loaded)
        if metric not in names:
            raise RecipeError(
                f"{metric!r} is not measured",
                where="training.metric_for_best_model",
                fix=f"measured: {', '.join(names)}",
            )
    return loaded
