"""``parallel:`` how a run is spread over processes."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from trainkit.errors import RecipeError
from trainkit.options.section import Section, broken_rule

Shard = Literal["none", "zero1", "zero2", "zero3", "zero3_offload", "fsdp2"]
"""The strategies that have names; ``trainkit.parallel.STRATEGIES`` has a row for each."""

SHARDS: tuple[str, ...] = get_args(Shard)
NONE: Shard = "none"
Schedule = Literal["1f1b", "interleaved", "zbv"]
"""Who computes what when in a pipeline; ``trainkit.parallel.pipeline`` has a row for each."""

_STAGES: Mapping[Schedule, range] = {
    "1f1b": range(1, 2),
    "interleaved": range(2, 1 << 16),
    "zbv": range(2, 3),
}


class ParallelOptions(Section):
    """How a run is spread over processes."""

    at: ClassVar[str] = "parallel"

    shard: Annotated[
        str,
        BeforeValidator(
            lambda value: NONE if value is None else value, json_schema_input_type=str | None
        ),
    ] = Field(
        NONE,
        description=f"{', '.join(SHARDS)}, or a DeepSpeed JSON file. `deepspeed: zero2` is "
        "short for `parallel: {shard: zero2}`.",
    )
    tensor: int = Field(
        1, ge=1, description="Ranks that each matrix product is split over; with zero1."
    )
    sequence: int = Field(
        1, ge=1, description="Ranks that each row is split over, for longer rows."
    )
    pipeline: int = Field(1, ge=1, description="Ranks that the layers are split over.")
    schedule: Schedule = Field(
        "1f1b",
        description="Of a pipeline: 1f1b; interleaved, with several stages on each rank; or zbv, "
        "two stages on each rank and nearly no waiting.",
    )
    stages_per_rank: int | None = Field(
        None, ge=1, description="Of a pipeline: 1 under 1f1b, else 2 unless set."
    )

    @model_validator(mode="after")
    def _stages_fit(self) -> "ParallelOptions":
        given = self.stages_per_rank
        if self.pipeline == 1:
            for key, is_set in (("schedule", self.schedule != "1f1b"), ("stages_per_rank", given)):
                if is_set:
                    raise broken_rule(
                        f"parallel.{key}",
                        "there is no pipeline whose stages it could say something of",
                        f"set parallel.pipeline to the number of ranks, or remove {key}",
                    )
        elif given is not None and given not in _STAGES[self.schedule]:
            allowed = "2 or more" if self.schedule == "interleaved" else _STAGES[self.schedule][0]
            raise broken_rule(
                "parallel.stages_per_rank",
                f"schedule {self.schedule} has {allowed} stages on a rank, not {given}",
                "remove it, or set schedule: interleaved",
            )
        return self

    @property
    def model_ranks(self) -> int:
        """Ranks that train on the same rows together."""
        return self.tensor * self.sequence * self.pipeline

    def data_ranks(self, world_size: int) -> int:
        """How many shares the rows of a step are dealt out to.

        Raises:
            RecipeError: so many processes cannot be divided so.
        """
        if world_size % self.model_ranks:
            named = ("tensor", "sequence", "pipeline")
            sizes = {name: getattr(self, name) for name in named if getattr(self, name) > 1}
            product = " x ".join(f"{name} {size}" for name, size in sizes.items())
            raise RecipeError(
                f"{world_size} process{'es' if world_size > 1 else ''} cannot be divided by "
                f"{product}",
                where=f"parallel.{next(iter(sizes))}",
                fix=f"start a multiple of {self.model_ranks} processes (one a GPU), or change "
                "these numbers",
            )
        return world_size // self.model_ranks
