"""What happens around the steps of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from trainkit.objectives.batches import BatchCounts
    from trainkit.train.background import Save
    from trainkit.train.loop import Loop


class Hook:
    """One part of it; all are asked in the order of the loop's list, on every rank."""

    def begin(self, loop: "Loop", checkpoint: Path | None) -> None:
        """All is made, and what a checkpoint holds is loaded."""

    def before_step(
        self,
        loop: "Loop",
        micro: Sequence[dict[str, Any]],
        counts: Sequence["BatchCounts"],
        seconds: float,
    ) -> None:
        """These micro-batches are a step; fetching them took so long."""

    def stepped(self, loop: "Loop", losses: Sequence[torch.Tensor]) -> None:
        """The update is made, and counted."""

    def due(self, loop: "Loop") -> None:
        """Behind each step, and each epoch: do what ``loop.control`` says is due."""

    def save(self, loop: "Loop", save: "Save") -> None:
        """Its own part of a checkpoint: small files."""

    def end(self, loop: "Loop") -> None:
        """Behind the last step."""
