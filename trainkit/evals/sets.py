"""THE TABLE of benchmark sets that need no network: one row a set. No torch, no harness.

Any other task of lm-evaluation-harness is known to it by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from trainkit.evals import readers
from trainkit.options.benchmarks import METRICS


@dataclass(frozen=True)
class BenchmarkSet:
    """A row.

    Attributes:
        name: on the command line, and of its directory.
        title: as its makers write it.
        group: the harness's name of all of it.
        folder: of its tasks, under the harness's ``tasks``.
        read: its published files.
        shots: examples before a question, where the harness's task leaves that open.
        subset: the beginning of a task's name that its subset follows.
        expected: what has been published for a model, to hold a score against.
    """

    name: str
    title: str
    group: str
    folder: str
    read: readers.Reader
    shots: int = 0
    expected: Mapping[str, float] = field(default_factory=dict)

    @property
    def metric(self) -> str:
        """The figure that stands for the set: the first that is measured."""
        return METRICS[self.name][0]


_7B, _2_7B = "LLaMA-7B", "Llama-2-7B"  # of AscendSpeed, and of MindSpeed-LLM: see the guide

SETS: Mapping[str, BenchmarkSet] = {
    row.name: row
    for row in (
        BenchmarkSet(
            "boolq",
            "BoolQ",
            "boolq",
            "super_glue/boolq",
            readers.read_boolq,
            expected={_7B: 0.742, _2_7B: 0.754},
        ),
        BenchmarkSet(
            "mmlu",
            "MMLU",
            "mmlu",
            "mmlu/default",
            readers.read_mmlu,
            shots=5,
            expected={_7B: 0.333, _2_7B: 0.457},
        ),
        BenchmarkSet(
            "gsm8k",
            "GSM8K",
            "gsm8k",
            "gsm8k",
            readers.read_gsm8k,
            shots=5,
            expected={_7B: 0.102},
        ),
        BenchmarkSet(
            "humaneval",
            "HumanEval",
            "humaneval",
            "humaneval",
            readers.read_humaneval,
            expected={_7B: 0.128, _2_7B: 0.128},
        ),
        BenchmarkSet(
            "agieval",
            "AGIEval",
            "agieval",
            "agieval",
            readers.read_agieval,
            expected={_7B: 0.210, _2_7B: 0.206},
        ),
        BenchmarkSet(
            "bbh",
            "BIG-Bench Hard",
            "bbh",
            "bbh",
            readers.read_bbh,
            shots=3,
            expected={_7B: 0.334, _2_7B: 0.344},
        ),
        BenchmarkSet(
            "ceval",
            "C-Eval",
            "ceval-valid",
            "ceval",
            readers.read_ceval,
            shots=5,
            expected={_7B: 0.408, _2_7B: 0.339},
        ),
    )
}
