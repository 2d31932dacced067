"""How one run is spread over processes: resolved once, used everywhere."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from trainkit.options.parallel import ParallelOptions
from trainkit.parallel.process import ProcessRank
from trainkit.parallel.strategies import TENSOR, Strategy

if TYPE_CHECKING:
    from trainkit.parallel.engine import Engine
    from trainkit.parallel.rows import RowSplit

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
        options: into how many parts matrix products, rows and layers are split.
    """

    strategy: Strategy
    process: ProcessRank
    engine: Engine = field(compare=False)
    options: ParallelOptions = field(default_factory=ParallelOptions)

    @classmethod
    def of(
        cls, strategy: Strategy, process: ProcessRank, options: ParallelOptions | None = None
    ) -> Layout:
        """Resolve a strategy for a process; imports the engine."""
        options = options or ParallelOptions()
        options.data_ranks(process.world_size)
        if options.pipeline > 1:
            return cls(strategy, process, _made(_PIPELINE)(options, process), options)
        splits = options.tensor > 1 and strategy.config is not None  # others are refused
        make = _made(TENSOR if splits else strategy.engine)
        given = [] if strategy.config is None else [strategy.config]
        engine = make(*given, options.tensor) if splits else make(*given)
        return cls(strategy, process, engine, options)

    @cached_property
    def place(self) -> tuple[int, int, int, int]:
        """This process's number in the directions pipeline, data, sequence and tensor."""
        rest, tensor = divmod(self.process.dist_rank, self.options.tensor)
        rest, sequence = divmod(rest, self.options.sequence)
        return *divmod(rest, self.data_size), sequence, tensor

    @property
    def data_rank(self) -> int:
        """Which shard of the rows this process trains on."""
        return self.place[1]

    @property
    def data_size(self) -> int:
        return self.options.data_ranks(self.process.world_size)

    @property
    def counts_rows(self) -> bool:
        """Whether what this process reads is counted: one of those that train on the same rows."""
        pipeline, _, sequence, tensor = self.place
        return not (pipeline or sequence or tensor)

    @property
    def loss_ranks(self) -> int:
        """Ranks that have a part of a step's loss each, over which gradients are averaged."""
        return self.data_size * self.options.sequence

    @property
    def counts_losses(self) -> bool:
        """Whether a loss that this process computes is counted; others compute the same."""
        return not self.place[-1]

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
    def optimizer_shards(self) -> int:
        """Into how many parts the optimizer's state is cut."""
        if self.options.pipeline > 1:
            return self.options.pipeline * (self.data_size if self.engine.keeps_masters else 1)
        return self.data_size if self.engine.shards_optimizer else 1

    @property
    def fits_its_ranks_only(self) -> bool:
        """Whether a checkpoint can be taken up by as many ranks only as have written it."""
        return self.engine.shards_optimizer and not self.engine.reshards
