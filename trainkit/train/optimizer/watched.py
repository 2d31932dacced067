"""The Trainer's seams for numbers: each step's are watched, and a bad step leaves no trace."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from trainkit.errors import TrainkitError
from trainkit.parallel import Layout
from trainkit.train.faults.bad_batch import BadBatch, write_batch
from trainkit.train.faults.bad_numbers import NumberPolicy
from trainkit.train.faults.signals import StopRequest
from trainkit.train.log.meter import Meter
from trainkit.train.optimizer.finite import NumberError, NumberGuard, hold_back, number_advice
from trainkit.train.optimizer.finite_weights import Walk, check_weights
from trainkit.train.optimizer.make import GradientHolder


class WatchedNumbers(Trainer):
    """A Trainer that takes no step with a loss or gradient that is not finite, or that spikes."""

    layout: Layout
    meter: Meter
    optimizer: Any
    latest_batch: dict[str, Any] | None
    _tr_loss: torch.Tensor
    _masters: GradientHolder | None = None
    _loss_before: torch.Tensor | None = None
    _walk: Walk | None = None

    def watch_numbers(
        self,
        policy: NumberPolicy | None,
        sample_name: Callable[[Any], str],
        stop: StopRequest,
        warn: Callable[[str], None],
    ) -> None:
        """Begin to watch; when the Trainer is made."""
        self._numbers = policy or NumberPolicy()
        self._guard = NumberGuard(
            self.accelerator,
            sample_name=sample_name,
            where=str(self.args.output_dir),
            advice=lambda: number_advice(self.args),
            stop=stop,
            policy=self._numbers,
            keep=self._keep_batch,
            tell=warn,
        )

    def _begin_step(self, samples: list[Sequence[Any]], batches: Sequence[dict[str, Any]]) -> None:
        """A step begins with these micro-batches."""
        self._guard.begin(samples, batches, step=self.state.global_step + 1)
        if self._numbers.leaves_out:
            self._loss_before = self._tr_loss.clone()
            self.meter.begin_step()

    @property
    def latest_rows(self) -> list[str]:
        """The rows, by name, of the micro-batch that was begun last."""
        return self._guard.rows_of(self.latest_batch)

    def _watched(self, loss: torch.Tensor, parts: int) -> torch.Tensor:
        """A micro-batch's loss, as its gradients are to be taken of it.

        Args:
            loss: of which the Trainer takes one of ``parts`` equal parts.
            parts: 1 where it takes it whole.
        """
        factor = self._guard.add_loss(loss.detach() / parts)
        return loss if factor is None else loss * factor

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The norm that Trainer logs; the step is not taken where it, or a loss, is bad."""
        grad_norm = super()._get_grad_norm(self._holder_of_gradients(model), grad_norm)
        is_scaled = self.accelerator.mixed_precision == "fp16"
        step, guard = self.state.global_step + 1, self._guard
        found_inf = guard.close(step, grad_norm, forgives_gradients=is_scaled)
        # A loss scaler and DeepSpeed hold the step back themselves.
        if not is_scaled and not self.layout.engine.holds_back:
            hold_back(self.optimizer.optimizer, found_inf, guard.flush, lambda: guard.is_held)
        elif not is_scaled:
            # The schedule goes on by the plan: DeepSpeed's word would stop it for a step.
            self.optimizer.optimizer.overflow = False
        if self._loss_before is not None:
            left_out = guard.left_out > 0
            self._tr_loss = torch.where(left_out, self._loss_before, self._tr_loss)
            self.meter.leave_out(left_out)
        return grad_norm

    def _holder_of_gradients(self, model: nn.Module) -> Any:
        """The fp32 masters have them, where there are some."""
        return model if self._masters is None else self._masters.gather_gradients()

    def check_numbers(self, what: str) -> None:
        """Raise a NumberError if a loss, gradient, weight or optimizer state is not finite."""
        self._guard.flush()
        fix = number_advice(self.args)
        self._walk = walk = self._walk or Walk(self.model)
        try:
            check_weights(
                self.model, self.optimizer, self.accelerator, what=what, fix=fix, walk=walk
            )
        except NumberError as error:
            error.step = self.state.global_step
            self._guard.keep_latest(error)
            raise

    def _keep_batch(self, bad: BadBatch) -> str:
        """Write down a bad step's batch; a disk that refuses it must not hide what happened."""
        try:
            folder = write_batch(Path(str(self.args.output_dir)), bad)
        except (OSError, TrainkitError) as error:
            return f"; its batch could not be kept: {error}"
        return f"; its batch is kept in {folder}"

    def _leave_out_skipped(self, logs: dict[str, float]) -> None:
        """Take the steps without an update out of a row's means, and count them."""
        num_steps, num_left_out = self._numbers.take_counts()
        num_skipped = self._guard.take_skipped()
        if num_skipped or self.accelerator.mixed_precision == "fp16":
            logs["num_skipped_steps"] = num_skipped
        if num_skipped and not 0 <= logs.get("grad_norm", 0.0) < float("inf"):
            del logs["grad_norm"]
        if num_left_out == num_steps and num_left_out:
            del logs["loss"]
        elif num_left_out:
            logs["loss"] *= num_steps / (num_steps - num_left_out)
