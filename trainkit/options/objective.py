"""``objective:`` what is optimised."""

from typing import Annotated, ClassVar, Literal, get_args

from pydantic import AfterValidator, Field, WithJsonSchema

from trainkit.options.section import Section
from trainkit.options.words import one_of

OBJECTIVE_NAMES: dict[str, str] = {
    "sft": "the mean cross entropy of the trained tokens",
    "dpo": "how far the better of two answers is ahead, against the model before training",
    "orpo": "the better answer's cross entropy, and the odds of it against the worse one's",
    "simpo": "the margin between the answers' mean log-probabilities",
}
"""The names of ``trainkit.objectives.OBJECTIVES``, with what is optimised."""

DEFAULT_OBJECTIVE = "sft"

ObjectiveName = Annotated[
    str,
    AfterValidator(lambda name: one_of(name, OBJECTIVE_NAMES)),
    WithJsonSchema({"type": "string", "enum": [*OBJECTIVE_NAMES]}),
]

COMPARING = frozenset({"dpo", "orpo", "simpo"})
"""The objectives whose samples are pairs of answers."""

PreferenceLoss = Literal[
    "sigmoid", "hinge", "ipo", "robust", "nca_pair", "apo_zero", "apo_down", "sppo_hard"
]
"""What ``preference.loss`` can be, by TRL's names."""

PREFERENCE_LOSSES: tuple[str, ...] = get_args(PreferenceLoss)

SMOOTHED = ("sigmoid", "robust")
"""The losses that labels which may be wrong have a part in."""


class PreferenceOptions(Section):
    """How two answers are compared."""

    at: ClassVar[str] = "preference"

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
    gamma: float = Field(
        0.5, ge=0, allow_inf_nan=False, description="Of simpo: the margin that is aimed at."
    )
