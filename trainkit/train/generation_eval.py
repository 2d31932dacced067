"""Answers to held-out conversations, held against their references."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from torch import nn
from transformers import PreTrainedTokenizerBase

from trainkit.data.images import IMAGE
from trainkit.data.messages import Conversation
from trainkit.data.options import DataOptions
from trainkit.data.prompt import PromptRenderer
from trainkit.data.vision import NoVision, Vision
from trainkit.errors import RecipeError
from trainkit.evals.metrics import AnswerMetric, answer_metrics, is_exact
from trainkit.models.context import context_of
from trainkit.models.generation import generate_rows
from trainkit.options import TaskOptions
from trainkit.options.training import ANSWERS, METRICS
from trainkit.train.data import read_conversations
from trainkit.train.evaluations import Measurement
from trainkit.train.hooks import LoopState
from trainkit.train.run import Run

if TYPE_CHECKING:
    from trainkit.evals.tasks import LoadedTasks


@dataclass(frozen=True)
class Answer:
    """One assistant turn, as it was written and as the model wrote it.

    Attributes:
        conversation: which conversation, counted from 0.
        turn: which of its messages, counted from 0.
        is_exact: equal except for white space at the ends.
    """

    conversation: int
    turn: int
    question: str
    expected: str
    given: str
    is_exact: bool
    scores: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GenerationEvalResult:
    """How many answers are exact."""

    rows: tuple[Answer, ...]

    @property
    def num_total(self) -> int:
        return len(self.rows)

    @property
    def accuracy(self) -> float:
        """Share of exact answers; 0 where nothing was asked."""
        return sum(row.is_exact for row in self.rows) / max(self.num_total, 1)

    @property
    def means(self) -> dict[str, float]:
        """The mean of each metric over all answers; empty where nothing was asked."""
        names = dict.fromkeys(name for row in self.rows for name in row.scores)
        return {
            name: sum(row.scores.get(name, 0.0) for row in self.rows) / len(self.rows)
            for name in names
        }

    def to_dict(self) -> dict[str, Any]:
        return {
            "accuracy": self.accuracy,
            "num_total": self.num_total,
            "num_exact": sum(row.is_exact for row in self.rows),
            "metrics": self.means,
            "rows": [asdict(row) for row in self.rows],
        }


@torch.no_grad()
def evaluate_answers(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
    *,
    max_new_tokens: int,
    batch_size: int,
    stop_token_ids: Sequence[int] = (),
    options: DataOptions | None = None,
    metrics: Sequence[AnswerMetric] = (),
    vision: Vision | NoVision | None = None,
) -> GenerationEvalResult:
    """Generate every assistant turn greedily from the reference turns before it.

    Prompts are rendered as in training, by the tokenizer's own chat template, tools included; a
    turn of tool calls is compared as the template prints it. Batches hold prompts of like length,
    padded on the left.

    The conversations' assistant turns are the references; without ``stop_token_ids`` the model's
    own generation settings say what ends an answer.
    """
    renderer = PromptRenderer(tokenizer, options, vision)
    questions = [
        (number, turn, renderer.input_ids(conversation.first(turn)))
        for number, conversation in enumerate(conversations)
        for turn, message in enumerate(conversation.messages)
        if message.role == "assistant" and turn > 0
    ]
    questions.sort(key=lambda question: len(question[2]))
    answers = []
    for start in range(0, len(questions), batch_size):
        batch = questions[start : start + batch_size]
        prompts = [prompt for _, _, prompt in batch]
        rows = [conversations[number].first(turn) for number, turn, _ in batch]
        pixels = renderer.pixels(rows, model.device)
        given = _generate(model, tokenizer, prompts, max_new_tokens, stop_token_ids, pixels)
        for (number, turn, _), text in zip(batch, given, strict=True):
            conversation = conversations[number]
            expected = renderer.expected(conversation.first(turn + 1))
            question = conversation.messages[turn - 1].content.replace(IMAGE, "<image>")
            scores = {metric.name: metric.judge(text, expected) for metric in metrics}
            exact = bool(is_exact(text, expected))
            answers.append(Answer(number, turn, question, expected, text, exact, scores))
    return GenerationEvalResult(tuple(sorted(answers, key=lambda a: (a.conversation, a.turn))))


def _generate(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop_token_ids: Sequence[int],
    pixels: Mapping[str, Any],
) -> list[str]:
    """The model's continuations of a batch, without special tokens."""
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    ends: dict[str, Any] = {"eos_token_id": list(stop_token_ids)} if stop_token_ids else {}
    rows = generate_rows(
        model,
        prompts,
        pad,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        use_cache=True,
        pad_token_id=pad,
        **pixels,
        **ends,
    )
    return tokenizer.batch_decode(rows, skip_special_tokens=True)


# The questions that a model is asked while it trains: held-out conversations and benchmarks.

DEFAULT_CONTEXT = 2048


def measurements(run: Run) -> list[Measurement]:
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
        vision=run.vision,
    )
    return GenerationEvalResult(tuple(row for one in gather_object([result]) for row in one.rows))


def _answers(loop: LoopState) -> Mapping[str, float]:
    with loop.sharing():
        result = answer(loop, loop.model)
    return {f"{ANSWERS}/{name}": value for name, value in result.means.items()}


def _scores(loop: LoopState) -> Mapping[str, float]:
    from trainkit.evals.model import PromptStyle, TrainedModel
    from trainkit.evals.run import evaluate_model
    from trainkit.evals.scores import Ranks as EvalRanks

    run, tasks, loaded = loop.run, loop.run.recipe.eval_tasks, loop.run.tasks
    assert tasks is not None
    assert loaded is not None
    tokenizer, model = run.tokenizer, loop.model

    def gather(value: Any) -> list[Any]:
        everyone: list[Any] = gather_object([value])
        return everyone

    chat = bool(tokenizer.chat_template) if tasks.chat_template is None else tasks.chat_template
    trained = TrainedModel(
        model,
        PromptStyle(tokenizer, run.data_options, chat=chat),
        stop_ids=run.data.stop_token_ids or [tokenizer.eos_token_id],
        max_length=context_of(model.config.to_dict()) or DEFAULT_CONTEXT,
        # Attention in training need not know a cache that several rows share.
        shares_beginnings=False,
        ranks=EvalRanks(loop.ranks.process_index, loop.ranks.num_processes, gather),
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
    """Read everything that is asked, so that what is wrong is said before the model is loaded."""
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
        run.held_out, num_dropped = read_conversations(
            sources, ledger, run.vision, run.data_options.images, most=generation.max_samples
        )
        if num_dropped:
            run.console.warn(
                f"{num_dropped} held-out rows cannot be asked and were skipped: {ledger} says why"
            )
        references = [
            message.content
            for conversation in run.held_out
            for message in conversation.messages
            if message.role == "assistant" and not message.tool_calls
        ]
        run.metrics = answer_metrics(generation.metrics, references, run.console.warn)
    if tasks is not None:
        run.tasks = _load_tasks(tasks, run.recipe.metric)


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
