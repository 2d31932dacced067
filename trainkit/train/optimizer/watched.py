"""Each step's numbers are watched, and a bad step leaves no trace."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.train.hooks import Hook, LoopState
from trainkit.train.optimizer.finite import NumberError, number_advice
from trainkit.train.optimizer.finite_weights import Walk, check_weights

if TYPE_CHECKING:
    from trainkit.train.background import Save


class Numbers(Hook):
    """What the rules about bad numbers remember, and a look at the weights before each save."""

    _walk: Walk | None = None

    def begin(self, loop: LoopState, checkpoint: Path | None) -> None:
        """Go on as the run before the checkpoint."""
        if checkpoint is not None:
            loop.run.numbers.load(checkpoint)

    def save(self, loop: LoopState, save: "Save") -> None:
        """What the rules remember."""
        if loop.args.should_save:
            save.attempt(partial(loop.run.numbers.save, save.directory))

    def check(self, loop: LoopState, what: str) -> None:
        """Raise a NumberError if a loss, gradient, weight or optimizer state is not finite."""
        loop.guard.flush()
        self._walk = walk = self._walk or Walk(loop.model)
        fix = number_advice(loop.args)
        try:
            check_weights(loop.model, loop.optimizer, loop.ranks, what=what, fix=fix, walk=walk)
        except NumberError as error:
            error.step = loop.state.global_step
            loop.guard.keep_latest(error)
            raise

    def leave_out_skipped(self, loop: LoopState, row: dict[str, Any]) -> None:
        """Take the steps without an update out of a row's means, and count them."""
        num_steps, num_left_out = loop.run.numbers.take_counts()
        num_skipped = loop.guard.take_skipped()
        if num_skipped or loop.args.fp16:
            row["num_skipped_steps"] = num_skipped
        if num_skipped and not 0 <= row.get("grad_norm", 0.0) < float("inf"):
            del row["grad_norm"]
        if num_left_out == num_steps and num_left_out:
            del row["loss"]
        elif num_left_out:
            row["loss"] *= num_steps / (num_steps - num_left_out)
