"""How an answer is judged against its reference. Neither torch nor the harness is needed."""

import importlib.util
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import regex

from trainkit.errors import RecipeError
from trainkit.options.training import AnswerMetricChoice, RegexMetric, metric_names

_WHERE = "generation_eval.metrics"
_SECONDS = 2
_LONG = 2000
"""Characters: what a model writes in 500 tokens."""


@dataclass(frozen=True)
class AnswerMetric:
    """One way to judge answers.

    Attributes:
        judge: a number from the answer and the reference; higher is better.
    """

    name: str
    judge: Callable[[str, str], float]


def answer_metrics(
    choices: Sequence[AnswerMetricChoice],
    references: Sequence[str] = (),
    warn: Callable[[str], None] = lambda text: None,
) -> list[AnswerMetric]:
    """The metrics that a recipe names, each tried before anything is trained.

    ``warn`` is told of the first answer that a metric cannot judge; such answers count as 0.

    Raises:
        RecipeError: a pattern is none, finds nothing or takes too long, or a function is not there
            or fails.
    """
    found = []
    for choice, name in zip(choices, metric_names(choices), strict=True):
        judge = _judge(choice, references)
        for reference in references[:1]:
            judge("", reference)
            judge(reference, reference)
        found.append(AnswerMetric(name, _never_failing(name, judge, warn)))
    return found


def _never_failing(
    name: str, judge: Callable[[str, str], float], warn: Callable[[str], None]
) -> Callable[[str, str], float]:
    """No answer ends the training of hours."""
    failed: list[str] = []

    def judged(answer: str, expected: str) -> float:
        try:
            return judge(answer, expected)
        except RecipeError as error:
            if not failed:
                warn(f"{error}\n  {name} counts this answer as 0, and others like it")
                failed.append(answer)
            return 0.0

    return judged


def _judge(choice: AnswerMetricChoice, references: Sequence[str]) -> Callable[[str, str], float]:
    if isinstance(choice, RegexMetric):
        return _regex(choice.regex, references)
    return {"exact_match": is_exact, "contains": contains}.get(choice) or _function(choice)


def is_exact(answer: str, expected: str) -> float:
    """1 where they are equal but for white space at the ends."""
    return float(answer.strip() == expected.strip())


def contains(answer: str, expected: str) -> float:
    """1 where the reference is a part of the answer, white space at its ends aside."""
    return float(expected.strip() in answer)


def _regex(pattern: str, references: Sequence[str]) -> Callable[[str, str], float]:
    try:
        compiled = regex.compile(pattern)
    except regex.error as error:
        raise RecipeError(f"regex {pattern!r} is no pattern: {error}", where=_WHERE) from None

    def found(text: str) -> str | None:
        try:
            match = compiled.search(text, timeout=_SECONDS)
        except TimeoutError:
            raise RecipeError(
                f"regex {pattern!r} takes longer than {_SECONDS} s over a text of {len(text)} "
                "characters",
                where=_WHERE,
                fix="write it without a repetition inside a repetition, as (a+)+",
            ) from None
        return None if match is None else match.group(1 if compiled.groups else 0)

    for text in _hostile_to(pattern):
        found(text)
    if references and all(found(each) is None for each in references):
        raise RecipeError(
            f"regex {pattern!r} finds nothing in any of the {len(references)} references",
            where=_WHERE,
            fix="write a pattern that finds what is to be compared, such as '#### (-?[0-9.,]+)'",
        )

    def judge(answer: str, expected: str) -> float:
        wanted = found(expected)
        return float(wanted is not None and wanted == found(answer))

    return judge


def _hostile_to(pattern: str) -> Iterator[str]:
    """Texts that a pattern goes through in ever more ways, and that do not end as it wants."""
    # The engine first looks for words that must be there.
    words = re.sub(r"\\[a-zA-Z]?", "", pattern)
    letters = dict.fromkeys(words + "a0 \n")
    for count in (1, 2):
        for repeated in itertools.product(letters, repeat=count):
            yield f"{''.join(repeated) * (_LONG // count)}\0{words}"


def _function(path: str) -> Callable[[str, str], float]:
    """A function of a file of the user's own, whose numbers are checked."""
    name = path.rpartition(":")[2]
    file = Path(path.rpartition(":")[0]).expanduser()
    if not file.is_file():
        raise RecipeError(
            f"there is no file {file.absolute()}",
            where=_WHERE,
            fix="give its path from the current directory: metrics/judge.py:function",
        )
    spec = importlib.util.spec_from_file_location(f"answer_metric_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's own code
        raise RecipeError(f"it cannot be imported: {error!r}", where=str(file)) from error
    function: Any = getattr(module, name, None)
    if not callable(function):
        raise RecipeError(f"there is no function {name} in it", where=str(file))

    def judge(answer: str, expected: str) -> float:
        try:
            value = function(answer, expected)
        except Exception as error:  # the user's own code
            raise RecipeError(f"{name} fails on an answer: {error!r}", where=str(file)) from error
        is_number = isinstance(value, int | float | bool) and math.isfinite(value)
        if not is_number:
            raise RecipeError(
                f"{name} returns {value!r}, and must return a finite number", where=str(file)
            )
        return float(value)

    return judge
