"""What is optimised: rows taken, batches, loss, figures, evaluation. THE TABLE is in `table`."""

from trainkit.objectives.sft import SFT
from trainkit.objectives.table import OBJECTIVES, objective_of

__all__ = ["OBJECTIVES", "SFT", "objective_of"]
