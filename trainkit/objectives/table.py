"""THE TABLE of objectives, and what a name in a recipe stands for."""

from trainkit.errors import RecipeError
from trainkit.objectives.dft import DFT, EAFT
from trainkit.objectives.distill import DISTILL, DISTILL_STORED
from trainkit.objectives.kto import KTO
from trainkit.objectives.objective import Objective
from trainkit.objectives.preference import DPO, ORPO, SIMPO
from trainkit.objectives.reward import REWARD
from trainkit.objectives.sft import SFT
from trainkit.options import DistillOptions
from trainkit.options.training import only_format

_ALL = (SFT, DFT, EAFT, DPO, ORPO, SIMPO, KTO, REWARD, DISTILL)
OBJECTIVES: dict[str, Objective] = {objective.name: objective for objective in _ALL}
"""Every objective by its name."""


def objective_of(name: str, distill: DistillOptions | None = None) -> Objective:
    """The objective of a recipe; of `distill` there are two kinds of rows."""
    is_stored = name == "distill" and only_format(name, distill) is not None
    return DISTILL_STORED if is_stored else OBJECTIVES[name]


def refuse_unfit_feeding(
    objective: Objective, *, packing: bool, streaming: bool, splits_rows: bool = False
) -> None:
    """Stop where the data section asks for what an objective cannot do."""
    for is_asked, can, what, key in (
        (packing, objective.packs, "does not train on packed rows", "data.packing"),
        (streaming, objective.streams, "needs all rows before it begins", "data.streaming"),
    ):
        if is_asked and not can:
            raise RecipeError(
                f"{objective.name} {what}", where=key, fix=f"set {key.partition('.')[2]}: false"
            )
    if splits_rows and not objective.splits_rows:
        raise RecipeError(
            f"the loss of {objective.name} is of whole rows, which ranks cannot share",
            where="parallel.sequence",
            fix="remove it",
        )
