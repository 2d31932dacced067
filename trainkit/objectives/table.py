"""THE TABLE of objectives, and what a name in a recipe stands for."""

from pkgutil import resolve_name

from trainkit.errors import RecipeError
from trainkit.objectives.objective import Objective
from trainkit.options import DistillOptions
from trainkit.options.training import only_format

OBJECTIVES: dict[str, str] = {
    "sft": "trainkit.objectives.sft:SFT",
    "dft": "trainkit.objectives.dft:DFT",
    "eaft": "trainkit.objectives.dft:EAFT",
    "dpo": "trainkit.objectives.preference:DPO",
    "orpo": "trainkit.objectives.preference:ORPO",
    "simpo": "trainkit.objectives.preference:SIMPO",
    "kto": "trainkit.objectives.kto:KTO",
    "reward": "trainkit.objectives.reward:REWARD",
    "distill": "trainkit.objectives.distill:DISTILL",
}
"""Where every objective is, by its name: a run imports its own."""


def objective_of(name: str, distill: DistillOptions | None = None) -> Objective:
    """The objective of a recipe; of `distill` there are two kinds of rows."""
    is_stored = name == "distill" and only_format(name, distill) is not None
    found: Objective = resolve_name(OBJECTIVES[name] + ("_STORED" if is_stored else ""))
    return found


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
