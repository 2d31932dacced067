"""THE TABLE: one row per strategy of sharding a run over processes. No torch.

``parallel: {shard: NAME}`` in a recipe names a row, or a DeepSpeed configuration file.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.errors import RecipeError
from trainkit.options.parallel import NONE, ParallelOptions
from trainkit.parallel.process import ProcessRank
from trainkit.places import regular

if TYPE_CHECKING:
    from trainkit.parallel.engine import Engine
    from trainkit.parallel.rows import RowSplit


_CONFIGS = Path(__file__).parents[1] / "configs" / "deepspeed"


@dataclass(frozen=True)
class Strategy:
    """One row.

    Attributes:
        name: as recipes write it.
        about: what each rank holds, for the help.
        engine: ``module:class`` of the engine, imported when a run begins.
        config: the engine's configuration file, where it has one.
    """

    name: str
    about: str
    engine: str
    config: Path | None = None

    @property
    def reads_precision(self) -> bool:
        """Whether the engine computes in what ``training.bf16`` and ``training.fp16`` say."""
        return self.engine == _DEEPSPEED


_DDP = "trainkit.parallel.engine:Engine"
_DEEPSPEED = "trainkit.parallel.zero.engine:DeepSpeed"
_FSDP2 = "trainkit.parallel.fsdp:Fsdp2"
TENSOR = "trainkit.parallel.zero.tensor:TensorParallel"
"""The engine of a DeepSpeed strategy whose matrix products are split."""

STRATEGIES: Mapping[str, Strategy] = {
    row.name: row
    for row in (
        Strategy(NONE, "each rank holds everything (DDP)", _DDP),
        Strategy(
            "zero1", "optimizer states are sharded (DeepSpeed)", _DEEPSPEED, _CONFIGS / "zero1.json"
        ),
        Strategy("zero2", "and gradients", _DEEPSPEED, _CONFIGS / "zero2.json"),
        Strategy("zero3", "and weights", _DEEPSPEED, _CONFIGS / "zero3.json"),
        Strategy(
            "zero3_offload",
            "and all of it waits in host memory",
            _DEEPSPEED,
            _CONFIGS / "zero3_offload.json",
        ),
        Strategy("fsdp2", "weights, gradients and optimizer states are sharded (torch)", _FSDP2),
    )
}


def strategy_for(shard: str) -> Strategy:
    """The row of a name; a file is a DeepSpeed configuration.

    Raises:
        RecipeError: there is neither such a row nor a file with a JSON object, with the reason.
    """
    if shard in STRATEGIES:
        return STRATEGIES[shard]
    path = Path(shard).expanduser()
    try:
        content = json.loads(
            regular(path, RecipeError).read_text(encoding="utf-8"), object_pairs_hook=_each_key_once
        )
    except OSError as error:
        raise RecipeError(
            f"there is no strategy {shard!r} and no file {path.absolute()}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{path} is not JSON: {error}") from error
    _check(content, path)
    return Strategy(shard, "as the file says (DeepSpeed)", _DEEPSPEED, path)


def _each_key_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object of a JSON file; json itself takes the last of two equal keys, and says nothing."""
    found = dict(pairs)
    for key, _ in pairs:
        if sum(key == other for other, _ in pairs) > 1:
            raise ValueError(f"the key {key!r} is there twice")
    return found


def _check(content: object, path: Path) -> None:
    """Refuse what DeepSpeed would fail on late, or take for something else."""
    if not isinstance(content, dict):
        raise RecipeError(f"{path} is not a JSON object")
    for key in ("zero_optimization", "fp16", "bf16", "optimizer", "scheduler"):
        if not isinstance(content.get(key, {}), dict):
            raise RecipeError(f"{path}: {key}: {content[key]!r} must be an object")
    checkpoint = content.get("checkpoint") or {}
    if not isinstance(checkpoint, dict):
        raise RecipeError(f"{path}: checkpoint: {checkpoint!r} must be an object")
    for key in ("load_universal", "writer"):
        if checkpoint.get(key):
            raise RecipeError(
                f"{path}: checkpoint.{key}: trainkit writes and reads DeepSpeed's files itself, so "
                "that nothing in them can run; leave it out"
            )
    stage = content.get("zero_optimization", {}).get("stage", 0)
    if type(stage) is not int or stage not in range(1, 4):
        raise RecipeError(
            f"{path}: zero_optimization.stage: {stage!r} must be 1, 2 or 3, without quotes; "
            "without DeepSpeed (no `deepspeed` in the recipe) nothing is sharded"
        )


# How one run is spread over processes: resolved once, used everywhere.

_PIPELINE = "trainkit.parallel.pipeline.engine:Pipeline"


def _made(engine: str) -> Callable[..., Engine]:
    """The class that a row of the table names, ``module:class``."""
    module, _, name = engine.partition(":")
    found: Callable[..., Engine] = getattr(importlib.import_module(module), name)
    return found


@dataclass(frozen=True)
class Layout:
    """Who reads which rows, who keeps what, and what a checkpoint is.

    Ranks are numbered with tensor as the innermost direction, then sequence, data and pipeline:
    what speaks most lies closest together.

    Attributes:
        strategy: the row of the table.
        process: this process.
        engine: answers what differs between strategies.
        options: into how many parts matrix products, rows and layers are split.
    """

    strategy: Strategy
    process: ProcessRank
    engine: Engine = field(compare=False)
    options: ParallelOptions = field(default_factory=ParallelOptions)

    @classmethod
    def of(
        cls,
        strategy: Strategy,
        process: ProcessRank,
        options: ParallelOptions | None = None,
    ) -> Layout:
        """Resolve a strategy for a process; imports the engine.

        Raises:
            RecipeError: the processes cannot be divided so.
        """
        options = options or ParallelOptions()
        options.data_ranks(process.world_size)
        if options.pipeline > 1:
            return cls(strategy, process, _made(_PIPELINE)(options, process), options)
        splits = options.tensor > 1 and strategy.config is not None  # others are refused
        make = _made(TENSOR if splits else strategy.engine)
        given = [] if strategy.config is None else [strategy.config]
        engine = make(*given, options.tensor) if splits else make(*given)
        return cls(strategy, process, engine, options)

    @property
    def data_rank(self) -> int:
        """Which shard of the rows this process trains on."""
        inner = self.options.tensor * self.options.sequence
        return self.process.dist_rank // inner % self.data_size

    @property
    def data_size(self) -> int:
        """How many shards there are."""
        return self.options.data_ranks(self.process.world_size)

    @property
    def tensor_rank(self) -> int:
        """Which part of each matrix product this process computes."""
        return self.process.dist_rank % self.options.tensor

    @property
    def sequence_rank(self) -> int:
        """Which part of each row this process computes."""
        return self.process.dist_rank // self.options.tensor % self.options.sequence

    @property
    def pipeline_rank(self) -> int:
        """Which of the ranks that share the layers this process is."""
        return self.process.dist_rank // (self.process.world_size // self.options.pipeline)

    @property
    def counts_rows(self) -> bool:
        """Whether what this process reads is counted: one of those that train on the same rows."""
        return not (self.tensor_rank or self.sequence_rank or self.pipeline_rank)

    @property
    def loss_ranks(self) -> int:
        """Ranks that have a part of a step's loss each, over which gradients are averaged."""
        return self.data_size * self.options.sequence

    @property
    def counts_losses(self) -> bool:
        """Whether a loss that this process computes is counted; others compute the same."""
        return not self.tensor_rank

    @cached_property
    def rows(self) -> RowSplit | None:
        """How rows are shared by ranks, None if they are not; all ranks ask for it first together.

        There is a process group by then.
        """
        if self.options.sequence == 1:
            return None
        from trainkit.parallel.rows import RowSplit

        apart = self.options.tensor
        reach = apart * self.options.sequence
        starts = [r for r in range(self.process.world_size) if r % reach < apart]
        return RowSplit.of([range(start, start + reach, apart) for start in starts])

    @property
    def keeps_masters(self) -> bool:
        """Whether the engine keeps fp32 copies of half-precision weights."""
        return self.engine.keeps_masters

    @property
    def optimizer_shards(self) -> int:
        """Into how many parts the optimizer's state is cut."""
        if self.options.pipeline > 1:
            return self.options.pipeline * (self.data_size if self.engine.keeps_masters else 1)
        return self.data_size if self.engine.shards_optimizer else 1

    @property
    def fits_its_ranks_only(self) -> bool:
        """Whether a checkpoint can be taken up by as many ranks only as have written it."""
        return self.engine.shards_optimizer and not self.engine.reshards
