"""What happens around the steps of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trainkit.objectives.batches import BatchCounts
from trainkit.train.background import Save


class Hook:
    """One part of it; all are asked in the order of the loop's list, on every rank.

    ``loop`` is the `trainkit.train.loop.Loop`, which imports its hooks.
    """

    def begin(self, loop: Any, checkpoint: Path | None) -> None:
        """All is made, and what a checkpoint holds is loaded."""

    def before_step(
        self,
        loop: Any,
        micro: Sequence[dict[str, Any]],
        counts: Sequence[BatchCounts],
        seconds: float,
    ) -> None:
        """These micro-batches are a step; fetching them took so long."""

    def stepped(self, loop: Any, losses: Sequence[torch.Tensor]) -> None:
        """The update is made, and counted."""

    def due(self, loop: Any) -> None:
        """Behind each step, and each epoch: do what ``loop.control`` says is due."""

    def save(self, loop: Any, save: Save) -> None:
        """Its own part of a checkpoint: small files."""

    def end(self, loop: Any) -> None:
        """Behind the last step."""
