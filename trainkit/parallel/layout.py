"""How one run is spread over processes: resolved once, asked by everybody."""

import importlib
from dataclasses import dataclass, field

from trainkit.parallel.engine import Engine
from trainkit.parallel.place import ProcessPlace
from trainkit.parallel.strategies import Strategy


@dataclass(frozen=True)
class Layout:
    """Who reads which rows, who keeps what, and what a checkpoint is.

    Attributes:
        strategy: the row of the table.
        place: this process.
        engine: answers what differs between strategies.
    """

    strategy: Strategy
    place: ProcessPlace
    engine: Engine = field(compare=False)

    @classmethod
    def of(cls, strategy: Strategy, place: ProcessPlace) -> "Layout":
        """Resolve a strategy on a place; imports the engine."""
        module, _, name = strategy.engine.partition(":")
        make = getattr(importlib.import_module(module), name)
        engine = make() if strategy.config is None else make(strategy.config)
        return cls(strategy, place, engine)

    @property
    def data_rank(self) -> int:
        """Which share of the rows this process trains on."""
        return self.place.dist_rank

    @property
    def data_size(self) -> int:
        """How many shares there are."""
        return self.place.world_size

    @property
    def keeps_masters(self) -> bool:
        """Whether the engine keeps fp32 copies of half-precision weights."""
        return self.engine.keeps_masters

    @property
    def optimizer_shards(self) -> int:
        """Into how many parts the optimizer's state is cut."""
        return self.data_size if self.engine.shards_optimizer else 1
