"""HumanEval without the harness's own runner: programs run in the sandbox, many at a time.

The harness's needs the hub when it is imported, and runs what a model wrote in its own process.
"""

import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trainkit.evals.sandbox import Verdict, run_program

_FENCE = "```"


class Programs:
    """Makes programs of answers, runs them, and knows how each ended."""

    def __init__(self, *, fenced: bool) -> None:
        """Begin.

        Args:
            fenced: the answers are chat answers, and code ends where a fence does.
        """
        self._fenced = fenced
        self._verdicts: dict[str, Verdict] = {}

    def build(
        self, answers: Sequence[Sequence[str]], docs: Sequence[Mapping[str, Any]]
    ) -> list[list[str]]:
        """Each answer behind its prompt, as the harness asks for; all of them run now."""
        programs = [
            [doc["prompt"] + self._code(answer) for answer in own]
            for own, doc in zip(answers, docs, strict=True)
        ]
        wanted = [
            _tested(program, f"{doc['test']}\ncheck({doc['entry_point']})")
            for own, doc in zip(programs, docs, strict=True)
            for program in own
        ]
        fresh = [each for each in dict.fromkeys(wanted) if each not in self._verdicts]
        with ThreadPoolExecutor(max(os.cpu_count() or 1, 1)) as pool:
            self._verdicts.update(zip(fresh, pool.map(run_program, fresh), strict=True))
        return programs

    def pass_at_k(
        self, references: Sequence[str], predictions: Sequence[Sequence[str]], k: Sequence[int]
    ) -> dict[str, float]:
        """The share of k tries of which one passes, estimated without bias from all tries."""
        (tests,), (programs,) = references, predictions
        passed = [self._verdict(_tested(each, tests)).passed for each in programs]
        return {f"pass@{size}": _estimate(len(passed), sum(passed), size) for size in k}

    def _code(self, answer: str) -> str:
        return answer.partition(_FENCE)[0] if self._fenced else answer

    def _verdict(self, program: str) -> Verdict:
        if program not in self._verdicts:
            self._verdicts[program] = run_program(program)
        return self._verdicts[program]

    def __deepcopy__(self, memo: Any) -> "Programs":
        return self


def with_sandbox(config: Mapping[str, Any]) -> dict[str, Any]:
    """A task of HumanEval with programs run here.

    Args:
        config: the harness's definition, its functions by name.
    """
    programs = Programs(fenced="instruct" in str(config["task"]))
    metrics = [
        {**metric, "metric": programs.pass_at_k, "aggregation": "mean", "higher_is_better": True}
        for metric in config["metric_list"]
    ]
    filters = [
        {"name": "create_test", "filter": [{"function": "custom", "filter_fn": programs.build}]}
    ]
    return {**config, "metric_list": metrics, "filter_list": filters}


def is_sandboxed(task: Any) -> bool:
    """Whether a task's programs run here."""
    metrics = task.get_config("metric_list") or ()
    owners = (getattr(each.get("metric"), "__self__", None) for each in metrics)
    return any(isinstance(owner, Programs) for owner in owners)


def _tested(program: str, tests: str) -> str:
    return f"{program}\n{tests}"


def _estimate(num_tries: int, num_passed: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k)."""
    if num_tries - num_passed < k:
        return 1.0
    return 1.0 - math.comb(num_tries - num_passed, k) / math.comb(num_tries, k)
