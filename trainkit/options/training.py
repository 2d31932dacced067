"""What is optimised, what is measured, and what a run does when something breaks."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from trainkit.options.data import Sources
from trainkit.options.model import Dtype
from trainkit.options.section import CONSENT, OnResume, Section, broken_rule, one_of

# -- ``objective:`` and ``preference:`` ----------------------------------------------------------


OBJECTIVE_NAMES: dict[str, str] = {
    "sft": "the mean cross entropy of the trained tokens",
    "dft": "the same with each token weighed by its own probability",
    "eaft": "the same with each token weighed by the entropy of the likeliest ones",
    "dpo": "how far the better of two answers is ahead, against the model before training",
    "orpo": "the better answer's cross entropy, and the odds of it against the worse one's",
    "kto": "answers that are good or bad by themselves, against the model before training",
    "distill": "how far the next-token distribution is from a teacher's",
    "reward": "a reward for each text, higher for the better of two answers",
    "simpo": "the margin between the answers' mean log-probabilities",
}
"""The names of ``trainkit.objectives.OBJECTIVES``, with what is optimised."""

OBJECTIVE_FORMATS = {
    "dpo": "preference",
    "orpo": "preference",
    "simpo": "preference",
    "reward": "preference",
    "kto": "rated",
    "distill": "distilled",
}
"""The one of ``ROW_FORMATS`` that an objective takes; the others take all that are not in here."""

DEFAULT_OBJECTIVE = "sft"

ObjectiveName = Annotated[
    str,
    OnResume(CONSENT),
    AfterValidator(lambda name: one_of(name, OBJECTIVE_NAMES)),
    WithJsonSchema({"type": "string", "enum": [*OBJECTIVE_NAMES]}),
]

WEIGHED = frozenset({"dft", "eaft"})
"""The objectives that weigh the cross entropy of each token."""

COMPARING = frozenset({"dpo", "orpo", "simpo", "kto", "reward"})
"""The objectives that `preference:` is of."""

PAIRED = COMPARING - {"kto"}
"""Those whose items are two answers to a prompt."""

REFERRING = frozenset({"dpo", "kto"})
"""Those that compare with the model before training."""

PreferenceLoss = Literal[
    "sigmoid", "hinge", "ipo", "robust", "nca_pair", "apo_zero", "apo_down", "sppo_hard"
]
"""What ``preference.loss`` can be, by TRL's names."""

PREFERENCE_LOSSES: tuple[str, ...] = get_args(PreferenceLoss)

SMOOTHED = ("sigmoid", "robust")
"""The losses that labels which may be wrong have a part in."""


class PreferenceOptions(Section):
    """How answers are judged."""

    at: ClassVar[str] = "preference"
    on_resume: ClassVar[str] = CONSENT

    beta: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="What differences of log-probabilities are multiplied with; of orpo, the "
        "weight of the odds. Null takes 0.1, and 2 for simpo.",
    )
    loss: PreferenceLoss = Field("sigmoid", description="Of dpo, by TRL's name.")
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=0.5,
        description="Share of pairs that are taken to be the wrong way round: conservative DPO "
        "with loss: sigmoid, robust DPO with loss: robust.",
    )
    length_normalized: bool = Field(
        False, description="Of dpo: divide an answer's log-ratio by its tokens; ipo always does."
    )
    sft_weight: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Of dpo and simpo: what the better answer's mean cross entropy weighs next to "
        "the loss (others' rpo_alpha, cpo_alpha, pref_ftx).",
    )
    sft_prompt: bool = Field(
        False, description="Of orpo: its cross entropy is over the prompt, too, as TRL's is."
    )
    precompute_reference: bool | None = Field(
        None,
        description="Of dpo and kto: ask the model before training once for all answers, ahead of "
        "the first step, and keep what it says. Null does so where the model trains whole; with "
        "adapters it is asked at every step, with these switched off. False of a model that trains "
        "whole loads it a second time and asks it at every step.",
    )
    share_prompts: bool = Field(
        False,
        description="Of pairs in packed rows: compute a prompt once, and have both answers attend "
        "to it. Losses and gradients are the same but for rounding.",
    )
    desirable_weight: float = Field(
        1.0, ge=0, allow_inf_nan=False, description="Of kto: what good answers weigh."
    )
    undesirable_weight: float = Field(
        1.0, ge=0, allow_inf_nan=False, description="Of kto: what bad answers weigh."
    )
    center_rewards: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Of reward: the weight of the squared sum of a pair's rewards, which keeps "
        "them around 0.",
    )
    gamma: float = Field(
        0.5, ge=0, allow_inf_nan=False, description="Of simpo: the margin that is aimed at."
    )


def only_format(objective: str, distill: "DistillOptions | None") -> str | None:
    """What an objective takes alone; a teacher that answers itself takes plain rows."""
    is_live = objective == "distill" and distill is not None and distill.teacher is not None
    return None if is_live else OBJECTIVE_FORMATS.get(objective)


DEFAULT_BETA, SIMPO_BETA = 0.1, 2.0
"""What ``preference.beta: null`` takes: of all objectives but simpo, and of simpo."""


class OnPolicyOptions(Section):
    """Answers that the student itself draws, instead of given ones."""

    at: ClassVar[str] = "distill.on_policy"
    on_resume: ClassVar[str] = CONSENT

    share: float = Field(
        1.0, ge=0, le=1, description="Of the rows: so many get an answer that the student draws."
    )
    rest: Literal["given", "teacher"] = Field(
        "given", description="The other rows' answers: their own, or drawn from the teacher."
    )
    every: int = Field(
        1, ge=1, description="Draw every so many steps, for all of these steps' rows at once."
    )
    max_new_tokens: int = Field(
        128, ge=1, description="Longest drawn answer; with its prompt data.max_length at most."
    )
    temperature: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="Logits are divided by it in drawing."
    )
    batch_size: int = Field(16, ge=1, description="Answers drawn at once.")


class DistillOptions(Section):
    """What is learnt from a teacher."""

    at: ClassVar[str] = "distill"
    on_resume: ClassVar[str] = CONSENT

    teacher: str | None = Field(
        None,
        min_length=1,
        description="A model with the same tokens: a directory or hub name. Null takes what one "
        "has said from the rows, which `trainkit generate --logprobs K` writes.",
    )
    teacher_revision: str | None = Field(None, description="Of a hub's model.")
    teacher_dtype: Dtype | None = Field(
        None, description="Of its weights in memory; null is the student's."
    )
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = Field(
        "forward_kl",
        description="forward_kl: of the student from the teacher, which it is to cover; "
        "reverse_kl: the other way round; jsd: of both from their mixture.",
    )
    jsd_share: float = Field(0.5, gt=0, lt=1, description="The teacher's part of jsd's mixture.")
    temperature: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="Logits of both are divided by it."
    )
    sft_weight: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="The part of the labels' cross entropy in the loss; the rest is the "
        "divergence's.",
    )
    on_policy: OnPolicyOptions | None = Field(
        None, description="Train on answers that the student draws; null on those of the rows."
    )


class EaftOptions(Section):
    """How `objective: eaft` weighs tokens: by (entropy / divisor) ** alpha."""

    at: ClassVar[str] = "eaft"
    on_resume: ClassVar[str] = CONSENT

    alpha: float = Field(1.0, ge=0, allow_inf_nan=False, description="The power; 0 is sft.")
    likeliest: int = Field(20, ge=2, description="So many of the likeliest tokens are looked at.")
    divisor: float = Field(
        3.0, gt=0, allow_inf_nan=False, description="Of the entropy; 3.0 is the most that 20 have."
    )


# -- ``generation_eval:``, ``eval_tasks:`` and ``early_stopping:`` -------------------------------


METRICS: Mapping[str, tuple[str, ...]] = {
    "boolq": ("acc",),
    "mmlu": ("acc",),
    "gsm8k": ("exact_match/strict-match", "exact_match/flexible-extract"),
    "humaneval": ("pass@1",),
    "agieval": ("acc",),
    "bbh": ("exact_match/get-answer",),
    "ceval": ("acc", "acc_norm"),
}
"""By the name of a set: its figures as the harness calls them, the one that stands for it first."""


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


# -- ``faults:`` ---------------------------------------------------------------------------------


OnBadNumbers = Literal["stop", "skip", "roll_back"]


class FaultOptions(Section):
    """What a run does when something around it breaks."""

    at: ClassVar[str] = "faults"

    step_timeout: float | None = Field(
        600.0,
        gt=0,
        description="Seconds without any progress after which a run is taken to hang: the stacks "
        "of all ranks are written to logs/ and it ends. The first step and saves may take six "
        "times as long; null waits for ever.",
    )
    on_bad_numbers: OnBadNumbers = Field(
        "stop",
        description="About a step whose loss or gradient is NaN or infinite, or whose loss spikes: "
        "stop: end the run before its update; skip: go on without its update; roll_back: go on "
        "from the last checkpoint, and without that update.",
    )
    max_skips: int = Field(
        5, ge=1, description="Steps in a row that on_bad_numbers: skip passes before it stops."
    )
    max_rollbacks: int = Field(
        3, ge=1, description="How often on_bad_numbers: roll_back does so before it stops."
    )
    spike: float | None = Field(
        None,
        gt=0,
        description="A loss spikes above median + spike x MAD of the last spike_window steps (the "
        "median distance from the median, at least 1% of it); null watches for none.",
    )
    spike_window: int = Field(
        100, ge=3, description="Steps that spike compares with; none is judged before so many."
    )
