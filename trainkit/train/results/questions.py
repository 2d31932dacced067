"""The questions that a model is asked while it trains: held-out conversations and benchmarks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object
from transformers import PreTrainedTokenizerBase

from trainkit.data.options import DataOptions
from trainkit.data.read.messages import Conversation
from trainkit.errors import RecipeError
from trainkit.estimate.context import context_of
from trainkit.evals.metrics import AnswerMetric, answer_metrics
from trainkit.options import EarlyStopping, GenerationOptions, TaskOptions
from trainkit.options.benchmarks import METRICS
from trainkit.options.evaluation import ANSWERS
from trainkit.parallel import Layout
from trainkit.parallel.ranks import Ranks
from trainkit.train.results.evaluations import (
    Measurement,
    Measurements,
    StopEarly,
)
from trainkit.train.results.generation_eval import GenerationEvalResult, evaluate_answers

if TYPE_CHECKING:
    from trainkit.evals.tasks import LoadedTasks

DEFAULT_CONTEXT = 2048


@dataclass(frozen=True)
class Questions:
    """What a run asks its model, and how.

    Attributes:
        held_out: conversations to be answered; empty asks nothing.
        generation: how they are answered; None where nothing is asked.
        metrics: how answers are judged.
        tasks: benchmarks; None where there are none.
        loaded: their questions.
        early: when to stop; None is at the end.
        options: how training renders conversations.
    """

    held_out: Sequence[Conversation] = ()
    generation: GenerationOptions | None = None
    metrics: Sequence[AnswerMetric] = ()
    tasks: TaskOptions | None = None
    loaded: "LoadedTasks | None" = None
    early: EarlyStopping | None = None
    options: DataOptions = field(default_factory=DataOptions)

    def attach(
        self,
        loop: Any,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: Sequence[int],
        say: Callable[[str], None],
    ) -> None:
        """Have a loop measure, and end early where that is wanted."""
        rows = self.measurements(tokenizer, stop_token_ids)
        if rows:
            measurements = loop.evaluations.measurements = Measurements(rows)
            loop.add_callback(measurements)
        if self.early is not None:
            loop.add_callback(StopEarly(self.early.patience, self.early.min_delta, say))

    def measurements(
        self, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int]
    ) -> list[Measurement]:
        """What the loop measures every so many steps."""
        rows = []
        generation, tasks = self.generation, self.tasks
        if generation is not None and generation.every is not None:
            rows.append(
                Measurement(
                    generation.every,
                    lambda loop: self._answers(loop, tokenizer, stop_token_ids),
                )
            )
        if tasks is not None:
            rows.append(
                Measurement(tasks.every, lambda loop: self._scores(loop, tokenizer, stop_token_ids))
            )
        return rows

    def answer(
        self,
        ranks: Ranks,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: Sequence[int],
    ) -> GenerationEvalResult:
        """Answer the held-out conversations; every rank takes a share, and has all answers then."""
        assert self.generation is not None
        mine = self.held_out[ranks.process_index :: ranks.num_processes]
        result = evaluate_answers(
            model,
            tokenizer,
            mine,
            max_new_tokens=self.generation.max_new_tokens,
            batch_size=self.generation.batch_size,
            stop_token_ids=stop_token_ids,
            options=self.options,
            metrics=self.metrics,
        )
        if ranks.num_processes == 1:
            return result
        return GenerationEvalResult.merge(gather_object([result]))

    def _answers(
        self,
        loop: Any,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: Sequence[int],
    ) -> Mapping[str, float]:
        with loop.sharing():
            result = self.answer(loop.ranks, loop.model, tokenizer, stop_token_ids)
        return {f"{ANSWERS}/{name}": value for name, value in result.means.items()}

    def _scores(
        self,
        loop: Any,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: Sequence[int],
    ) -> Mapping[str, float]:
        from trainkit.evals.model import Ranks as EvalRanks
        from trainkit.evals.model import TrainedModel
        from trainkit.evals.prompts import PromptStyle
        from trainkit.evals.run import evaluate_model

        assert self.tasks is not None
        assert self.loaded is not None
        model, size = loop.model, loop.ranks.num_processes
        chat = self.tasks.chat_template
        chat = bool(tokenizer.chat_template) if chat is None else chat
        gather = (lambda value: gather_object([value])) if size > 1 else (lambda value: [value])
        trained = TrainedModel(
            model,
            PromptStyle(tokenizer, self.options, chat=chat),
            stop_ids=stop_token_ids or [tokenizer.eos_token_id],
            max_length=context_of(model.config.to_dict()) or DEFAULT_CONTEXT,
            # Attention in training need not know a cache that several rows share.
            shares_beginnings=False,
            ranks=EvalRanks(loop.ranks.process_index, size, gather),
        )
        with loop.sharing():
            found = evaluate_model(
                trained,
                self.loaded,
                limit=self.tasks.limit,
                chat=chat,
                settings={},
                gather=gather,
            )
        given = {spec: name for name, spec in self.loaded.names.items()}
        figures = (
            {}
            if found is None
            else {
                f"{given[score.task]}/{score.metric}": score.value
                for score in found.scores
                if score.task in given
            }
        )
        result: Mapping[str, float] = gather(figures)[0]
        return result


def load_questions(
    *,
    held_out: Sequence[Conversation],
    generation: GenerationOptions | None,
    tasks: TaskOptions | None,
    early: EarlyStopping | None,
    options: DataOptions,
    layout: Layout,
    metric: str | None,
) -> Questions:
    """Read everything that is asked, so that what is wrong is said before the model is loaded.

    Args:
        held_out: conversations.
        generation: of the recipe.
        tasks: of the recipe.
        early: of the recipe.
        options: how training renders conversations.
        layout: how the run is spread over processes.
        metric: what the best model is judged by.

    Raises:
        TrainkitError: a metric or a task cannot be used.
    """
    every = None if generation is None else generation.every
    if not layout.engine.holds_whole_model and (tasks is not None or every is not None):
        raise RecipeError(
            "no process holds the whole model, so none can answer questions of its own",
            where="eval_tasks" if tasks is not None else "generation_eval.every",
            fix="remove it; `trainkit eval` measures checkpoints",
        )
    references = [
        message.content
        for conversation in held_out
        for message in conversation.messages
        if message.role == "assistant" and not message.tool_calls
    ]
    metrics = answer_metrics(generation.metrics, references) if generation is not None else []
    loaded = _load_tasks(tasks, metric) if tasks is not None else None
    return Questions(held_out, generation, metrics, tasks, loaded, early, options)


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
