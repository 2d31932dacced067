"""Each step's numbers are watched, and a bad step leaves no trace."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.errors import TrainkitError
from trainkit.train.faults.bad_batch import BadBatch, write_batch
from trainkit.train.faults.bad_numbers import NumberPolicy
from trainkit.train.hooks import Hook
from trainkit.train.optimizer.finite import NumberError, NumberGuard, number_advice
from trainkit.train.optimizer.finite_weights import Walk, check_weights

if TYPE_CHECKING:
    from trainkit.train.background import Save


class Numbers(Hook):
    """The guard over a run's numbers, and what the rules about bad ones remember.

    Args:
        loop: whose steps are watched.
        policy: the rules.
        warn: tells the user what the run goes on without.
    """

    def __init__(self, loop: Any, policy: NumberPolicy, warn: Callable[[str], None]) -> None:
        self._args, self.policy = loop.args, policy
        self._walk: Walk | None = None
        self.guard = NumberGuard(
            loop.ranks,
            sample_name=loop.train_data.sample_name,
            where=str(loop.args.output_dir),
            advice=lambda: number_advice(loop.args),
            stop=loop.stop,
            policy=policy,
            keep=self._keep_batch,
            tell=warn,
        )

    def begin(self, loop: Any, checkpoint: Path | None) -> None:
        """Go on as the run before the checkpoint."""
        if checkpoint is not None:
            self.policy.load(checkpoint)

    def save(self, loop: Any, save: "Save") -> None:
        """What the rules remember."""
        if loop.args.should_save:
            save.attempt(partial(self.policy.save, save.directory))

    def check(self, loop: Any, what: str) -> None:
        """Raise a NumberError if a loss, gradient, weight or optimizer state is not finite."""
        self.guard.flush()
        self._walk = walk = self._walk or Walk(loop.model)
        fix = number_advice(self._args)
        try:
            check_weights(loop.model, loop.optimizer, loop.ranks, what=what, fix=fix, walk=walk)
        except NumberError as error:
            error.step = loop.state.global_step
            self.guard.keep_latest(error)
            raise

    def _keep_batch(self, bad: BadBatch) -> str:
        """Write down a bad step's batch; a disk that refuses it must not hide what happened."""
        try:
            folder = write_batch(Path(str(self._args.output_dir)), bad)
        except (OSError, TrainkitError) as error:
            return f"; its batch could not be kept: {error}"
        return f"; its batch is kept in {folder}"

    def leave_out_skipped(self, row: dict[str, Any]) -> None:
        """Take the steps without an update out of a row's means, and count them."""
        num_steps, num_left_out = self.policy.take_counts()
        num_skipped = self.guard.take_skipped()
        if num_skipped or self._args.fp16:
            row["num_skipped_steps"] = num_skipped
        if num_skipped and not 0 <= row.get("grad_norm", 0.0) < float("inf"):
            del row["grad_norm"]
        if num_left_out == num_steps and num_left_out:
            del row["loss"]
        elif num_left_out:
            row["loss"] *= num_steps / (num_steps - num_left_out)
