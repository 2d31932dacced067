"""``parallel:`` and ``recompute:`` how a run is spread, and which activations it computes again."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

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
    on_resume: ClassVar[str] = "the saved shards fit the engine and the stage that wrote them"

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
        """How many shares the rows of a step are dealt out to."""
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


# -- ``recompute:`` activations that are computed again in the backward pass ---------------------


Word = Literal["none", "full", "selective"]


class RecomputeOptions(Section):
    """Some layers of the model, or as many as a budget of memory asks for."""

    at: ClassVar[str] = "recompute"

    every: int | None = Field(
        None, ge=1, description="Recompute layers 0, k, 2k, ...: 1 is all of them, 2 every other."
    )
    selective: bool = Field(
        False,
        description="Of those layers keep matrix products and attention; recompute norms, gates "
        "and rope.",
    )
    budget_gib: float | None = Field(
        None,
        gt=0,
        description="Peak memory of a GPU in GiB: three steps are measured, then as few layers are "
        "recomputed, and then offloaded, as it allows.",
    )
    offload: Literal["auto", True, False] = Field(
        "auto",
        description="Inputs of recomputed layers wait in host memory. auto: with a budget where it "
        "asks for it, with adapters as lora.offload_activations says, else not.",
    )

    @model_validator(mode="after")
    def _says_which_layers(self) -> "RecomputeOptions":
        if (self.every is None) == (self.budget_gib is None):
            raise broken_rule(
                "recompute",
                "recompute takes every or budget_gib, one of them",
                "write recompute: {every: 2}, or recompute: {budget_gib: 60}",
            )
        if self.selective and self.budget_gib is not None:
            raise broken_rule(
                "recompute.selective",
                "a budget recomputes whole layers, as few of them as it can",
                "remove selective, or write recompute: selective",
            )
        if self.selective and self.offload is True:
            raise broken_rule(
                "recompute.offload",
                "what selective keeps stays on the GPU, and so does a layer's input",
                "remove selective or offload",
            )
        return self

    @classmethod
    def of(cls, value: "str | RecomputeOptions | None") -> "RecomputeOptions | None":
        """What ``recompute`` says, spelt out; None where nothing is recomputed."""
        return WORDS[value] if isinstance(value, str) else value


WORDS: Mapping[str, RecomputeOptions | None] = {
    "none": None,
    "full": RecomputeOptions(every=1),
    "selective": RecomputeOptions(every=1, selective=True),
}
"""THE TABLE of words: what each is short for."""


def _form(value: object) -> str:
    return "section" if isinstance(value, Mapping | RecomputeOptions) else "word"


Recompute = Annotated[
    Annotated[Word, Tag("word")] | Annotated[RecomputeOptions, Tag("section")], Discriminator(_form)
]
"""A word, or a section."""


# -- What decides whether a way of spreading a run can serve it ----------------------------------


@dataclass(frozen=True)
class Combination:
    """What of a recipe the rows look at.

    Attributes:
        shard: a strategy's name, or a file.
        tensor, sequence, pipeline: ranks that products, rows and layers are split over.
        is_packed: several documents share a row.
        computes_fp8: matrix products run in fp8.
        recompute: the recipe's ``recompute``, spelt out; None where nothing is recomputed.
        adds_tokens: the recipe extends the vocabulary.
        mixes_dtypes: adapters train in another dtype than modules that train whole next to them.
        tiles_mlp: feed-forward blocks compute some tokens at a time.
        lora: what of the adapters a pipeline cannot spread: its key, or None.
        offloads: the key that sends activations to the host, or None.
        measures: the keys that have the model asked questions while it trains.
        routers: the keys that give the routers losses.
    """

    shard: str
    tensor: int
    sequence: int
    pipeline: int
    schedule: str | None
    training: Mapping[str, Any]
    model_dtype: str = "bfloat16"
    quantize: str | None = None
    has_adapters: bool = False
    is_packed: bool = False
    attention: str = "auto"
    max_length: int = 0
    computes_fp8: bool = False
    recompute: RecomputeOptions | None = None
    optim_in_backward: bool = False
    master_weights: bool = True
    objective: str = "sft"
    adds_tokens: bool = False
    mixes_dtypes: bool = False
    tiles_mlp: bool = False
    lora: str | None = None
    offloads: str | None = None
    measures: tuple[str, ...] = ()
    routers: tuple[str, ...] = ()
