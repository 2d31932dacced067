"""What is measured while a model trains, and what ends a run early."""

import re
from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field, model_validator

from trainkit.options.benchmarks import METRICS
from trainkit.options.data import Sources
from trainkit.options.section import Section, broken_rule
from trainkit.options.words import one_of

ANSWERS = "answers"
"""The figures of ``generation_eval`` are called ``answers/METRIC``."""


class RegexMetric(Section):
    """What a pattern finds in an answer must be what it finds in the reference."""

    at: ClassVar[str] = "generation_eval.metrics[]"

    regex: str = Field(
        min_length=1, description="A Python pattern; its first group counts, or all that it finds."
    )


_FUNCTION = re.compile(r".+\.py:[A-Za-z_]\w*")
_NAMED = ("exact_match", "contains")


def _metric(choice: str) -> str:
    return choice if _FUNCTION.fullmatch(choice) else one_of(choice, (*_NAMED, "FILE.py:FUNCTION"))


AnswerMetricChoice = Annotated[str, AfterValidator(_metric)] | RegexMetric


def _default_metrics() -> list[AnswerMetricChoice]:
    return ["exact_match"]


def metric_names(metrics: Sequence[AnswerMetricChoice]) -> list[str]:
    return [
        "regex" if isinstance(each, RegexMetric) else each.rpartition(":")[2] for each in metrics
    ]


class GenerationOptions(Section):
    """Answer held-out conversations greedily, after training and during it."""

    at: ClassVar[str] = "generation_eval"

    data: Sources = Field(min_length=1, description="Files of conversations with their answers.")
    max_new_tokens: int = Field(128, ge=1, description="Longest answer, in tokens.")
    max_samples: int | None = Field(None, ge=1, description="Answers to ask for; null is all.")
    batch_size: int = Field(16, ge=1, description="Conversations answered at once.")
    every: int | None = Field(
        None, ge=1, description="Answer them every so many steps, too; null is after training only."
    )
    metrics: list[AnswerMetricChoice] = Field(
        default_factory=_default_metrics,
        min_length=1,
        description="How answers are judged: exact_match, contains (the reference is in the "
        "answer), {regex: PATTERN}, or FILE.py:FUNCTION, which takes the answer and the reference "
        "and returns a number.",
    )

    @model_validator(mode="after")
    def _names_differ(self) -> "GenerationOptions":
        names = metric_names(self.metrics)
        for name in names:
            if names.count(name) > 1:
                raise broken_rule("metrics", f"two metrics are called {name}", "keep one of them")
        return self

    def figures(self) -> list[str]:
        """The names under which its figures are logged, without ``eval_``."""
        return [f"{ANSWERS}/{name}" for name in metric_names(self.metrics)]


class TaskChoice(Section):
    """Benchmarks, and how their questions are put."""

    at: ClassVar[str] = "eval_tasks"

    tasks: list[str] = Field(
        min_length=1,
        description="As `trainkit eval --tasks` takes them: boolq, mmlu_anatomy, gsm8k, ...",
    )
    data: str | None = Field(
        None, description="Directory with the sets' files; null fetches them from the hub."
    )
    limit: int | None = Field(None, ge=1, description="Questions of each task; null is all.")
    shots: int | None = Field(
        None, ge=0, description="Examples before each question; null is as the set has it."
    )
    allow_code: bool = Field(
        False, description="Run the programs that the model writes (humaneval)."
    )


class TaskOptions(TaskChoice):
    """Ask the model a part of some benchmarks' questions while it trains."""

    every: int = Field(ge=1, description="Ask every so many steps.")
    limit: int | None = Field(100, ge=1, description="Questions of each task; null is all.")
    chat_template: bool | None = Field(
        None, description="Ask with the chat template; null is where conversations are trained."
    )

    def figures(self) -> list[str]:
        """The names under which the figures of the known sets are logged, without ``eval_``."""
        known = [(task, METRICS[task]) for task in self.tasks if task in METRICS]
        return [f"{task}/{metric}" for task, metrics in known for metric in metrics]

    def may_measure(self, figure: str) -> bool:
        """Whether a figure is of one of the tasks; of tasks that the table does not know, all."""
        task, slash, _ = figure.partition("/")
        if not slash or task not in self.tasks:
            return False
        return task not in METRICS or figure in self.figures()


class EarlyStopping(Section):
    """End training when ``training.metric_for_best_model`` gets no better."""

    at: ClassVar[str] = "early_stopping"

    patience: int = Field(ge=1, description="Evaluations in a row that may bring nothing.")
    min_delta: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="What less is no improvement."
    )
