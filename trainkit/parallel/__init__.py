"""How a run is spread over processes: THE TABLE of strategies, and the layout resolved from it.

Nothing outside this package asks which engine trains. It knows errors and nothing else of trainkit;
what it needs of a model, it is given.
"""

from trainkit.parallel.layout import Layout
from trainkit.parallel.process import Machine, ProcessRank
from trainkit.parallel.strategies import STRATEGIES, Strategy, strategy_for

__all__ = ["STRATEGIES", "Layout", "Machine", "ProcessRank", "Strategy", "strategy_for"]
