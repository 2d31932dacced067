"""THE TABLE of objectives, and what a name in a recipe stands for."""

from collections.abc import Iterable

from trainkit.data.formats import FORMATS
from trainkit.errors import RecipeError
from trainkit.objectives.distill import DISTILL, DISTILL_STORED
from trainkit.objectives.kto import KTO
from trainkit.objectives.objective import Objective
from trainkit.objectives.preference import DPO, ORPO, SIMPO
from trainkit.objectives.reward import REWARD
from trainkit.objectives.sft import SFT
from trainkit.options import DistillOptions, Source

OBJECTIVES: dict[str, Objective] = {
    objective.name: objective for objective in (SFT, DPO, ORPO, SIMPO, KTO, REWARD, DISTILL)
}
"""Every objective by its name."""


def objective_of(name: str, distill: DistillOptions | None = None) -> Objective:
    """The objective of a recipe; of `distill` there are two kinds of rows."""
    is_live = distill is not None and distill.teacher is not None
    return DISTILL_STORED if name == "distill" and not is_live else OBJECTIVES[name]


def formats_of(objective: Objective) -> frozenset[str]:
    """The names of ``FORMATS`` whose rows an objective takes."""
    if objective.formats is not None:
        return objective.formats
    rows = (*OBJECTIVES.values(), DISTILL_STORED)
    claimed = [row.formats for row in rows if row.formats is not None]
    return frozenset(FORMATS).difference(*claimed)


def sources_of(objective: Objective, sources: Iterable[Source]) -> tuple[Source, ...]:
    """Sources with the formats an objective takes; ``auto`` is its only one, if it has only one."""
    taken = formats_of(objective)
    found = []
    for source in sources:
        alone = source.format == "auto" and len(taken) == 1
        found.append(source.replace(format=next(iter(taken))) if alone else source)
        if found[-1].format not in taken | {"auto"}:
            raise RecipeError(
                f"{objective.name} cannot train on rows of the format {source.format}",
                where=f"data.format: {source.path}",
                fix=f"it takes {', '.join(sorted(taken))}",
            )
    return tuple(found)


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
                f"{objective.name} {what}",
                where=key,
                fix=f"set {key.partition('.')[2]}: false",
            )
    if splits_rows and not objective.splits_rows:
        raise RecipeError(
            f"the loss of {objective.name} is of whole rows, which ranks cannot share",
            where="parallel.sequence",
            fix="remove it",
        )
