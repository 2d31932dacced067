"""The training algorithm: `Loop.train`, and one step of it, `Loop.step`.

What happens around the steps is in hooks, asked in the order of one list. What differs between
strategies of spreading a run over processes is the engine's. transformers' callbacks are told what
its Trainer tells them; a test holds each figure and weight against that Trainer's.
"""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerState

from trainkit.models.vision import ratio_by_part
from trainkit.objectives.objective import BatchCounts, Step, take_counts, take_sample_ids
from trainkit.parallel.engine import Training
from trainkit.train.checkpoints import TRAINER_STATE, read_weights
from trainkit.train.data import EpochPlan, train_loader
from trainkit.train.faults.numbers import hold_back
from trainkit.train.hooks import LoopState
from trainkit.train.model import prepare_to_train
from trainkit.train.optimizer import averages_gradients, make_optimizer, make_schedule
from trainkit.train.prepare import settings_refused_by
from trainkit.train.saves import load_random_state, load_schedule


class Loop(LoopState):
    """Trains a causal language model on prepared samples, as an objective says."""

    # -- the algorithm ----------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | Path | None = None) -> TrainerState:
        checkpoint = None if resume_from_checkpoint is None else Path(resume_from_checkpoint)
        try:
            self._train(checkpoint)
        except Exception as error:
            with suppress(Exception):  # the first error is the one to tell of
                self.tell("failed", error)
            self.checkpoints.settle()
            raise
        return self.state

    def _train(self, checkpoint: Path | None) -> None:
        self._make(checkpoint)
        first, done = self.epochs.place_of(self.state.global_step)
        if self.stream is not None:
            first = 0  # it knows itself where it was
        self.event("on_train_begin")
        self.tell("begin", checkpoint)
        self.wrapped.train()
        if checkpoint is not None:  # last: what is proved before the first step may have drawn some
            load_random_state(checkpoint, self.args, self.run.point)
        for epoch in range(first, self.epochs.num_epochs):
            if self.control.should_training_stop:
                break
            if not self.epochs.num_steps(epoch):
                continue  # no row of any source is due
            self.event("on_epoch_begin")
            done = 0 if self.args.ignore_data_skip else done
            batches = self.loader.epoch(epoch, done * self.args.gradient_accumulation_steps)
            for number in range(done, self.epochs.num_steps(epoch)):
                if self.is_over:
                    break
                self.step(batches, epoch, number)
                self.tell("due")
            done = 0
            self.event("on_epoch_end")
            self.tell("due")
        self.guard.flush()
        self.tell("end")
        self.event("on_train_end")
        self.checkpoints.wait()

    def step(self, batches: Iterator[Any], epoch: int, number: int) -> None:
        args, state, engine = self.args, self.state, self.engine
        started = time.perf_counter()
        # The last step of an epoch may have fewer.
        micro = list(itertools.islice(batches, args.gradient_accumulation_steps))
        seconds = time.perf_counter() - started
        samples = [take_sample_ids(batch) for batch in micro]
        counts = [take_counts(batch, self.loss.num_items) for batch in micro]
        self.guard.begin(samples, micro, step=state.global_step + 1)
        self.tell("before_step", micro, counts, seconds)
        loss = partial(self.micro_loss, num_items=self._num_items(counts), parts=len(micro))
        self.event("on_step_begin")
        if not self.model.training:  # somebody has left it so
            self.wrapped.train()
        with self.guard.explaining():
            losses = engine.forward_backward(
                self._prepared(micro), len(micro), loss, self._watch_loss
            )
        before = partial(self.event, "on_pre_optimizer_step")
        self.norm, goes_on = engine.update(args.max_grad_norm or float("inf"), self._judge, before)
        self.event("on_optimizer_step")
        self.rate = float(self.optimizer.param_groups[0]["lr"])
        if goes_on and not self.follows_metric:
            self.scheduler.step()
        engine.clear()
        state.global_step += 1
        in_epoch = self.epochs.num_batches(epoch)
        state.epoch = (
            epoch + min((number + 1) * args.gradient_accumulation_steps, in_epoch) / in_epoch
        )
        if self.stream is not None:  # which may begin this process anywhere
            state.epoch = state.global_step / state.max_steps
        self.tell("stepped", losses)
        self.event("on_step_end")

    def micro_loss(
        self, model: nn.Module, batch: dict[str, Any], *, num_items: torch.Tensor, parts: int
    ) -> torch.Tensor:
        """A micro-batch's part of the step's loss."""
        divides = not self.takes_num_items
        step = Step(
            num_items=num_items,
            num_micro_batches=parts,
            num_ranks=self.num_loss_ranks,
            trainer_divides=divides,
            trainer_loss=self._model_loss,
            total=partial(self.total, counted=self.layout.counts_losses),
        )
        with self.sharing():
            loss, _ = self.loss.training(model, batch, step)
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            torch.cuda.empty_cache()
        return loss / parts if divides else loss

    # -- parts of a step --------------------------------------------------------------------------

    def _prepared(self, micro: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for number, batch in enumerate(micro):
            if number:
                self.event("on_substep_end")
            yield self.prepare(batch)

    def _num_items(self, counts: Sequence[BatchCounts]) -> torch.Tensor:
        """What a step's losses are divided by: the items of its rows, those of all data ranks."""
        # Filled on the device: a copy from the host would wait for the step before.
        count = torch.full((), sum(each.num_items for each in counts), device=self.args.device)
        # as a fraction, since it divides fractions
        return self.total(count, counted=self.layout.counts_rows) / 1

    def _model_loss(
        self, model: nn.Module, inputs: dict[str, Any], num_items: torch.Tensor | int | None
    ) -> tuple[torch.Tensor, Any]:
        """What the model returns, times the ranks that have a part of it; and its outputs."""
        is_counted = self.takes_num_items and num_items is not None
        outputs = model(**inputs, **({"num_items_in_batch": num_items} if is_counted else {}))
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        return (loss * self.num_loss_ranks if is_counted else loss), outputs

    def _watch_loss(self, loss: torch.Tensor) -> torch.Tensor | None:
        """Tell the guard, and optimizers that step in the backward pass."""
        factor = self.guard.add_loss(loss)
        if self.run.recipe.optim_in_backward:
            self.optimizer.block(~(loss if factor is None else loss * factor).isfinite())
        return factor

    def _judge(self, norm: torch.Tensor | float | None, optimizer: Any) -> None:
        """The verdict on a step's numbers; a bad step of ``optimizer`` is held back."""
        guard, step = self.guard, self.state.global_step + 1
        found_inf = guard.close(step, norm, forgives_gradients=self.args.fp16)
        if optimizer is not None:
            hold_back(optimizer, found_inf, guard.flush, lambda: guard.is_held)

    # -- before the first step --------------------------------------------------------------------

    def _make(self, checkpoint: Path | None) -> None:
        """Weights, placement, optimizer, schedule, state: in this order."""
        args, engine, model = self.args, self.engine, self.model
        if self.stream is not None and checkpoint is not None:
            self.stream.load(checkpoint)
        self.loader = train_loader(self.train_data, self.stream, args, self.layout)
        self.epochs = EpochPlan.of(self.loader, args, is_equal=self.train_data.has_equal_epochs)
        max_steps = self.epochs.max_steps
        prepare_to_train(model, self.tokenizer, args)
        if checkpoint is not None:
            engine.load_weights(model, partial(read_weights, model, checkpoint))
        self.create_optimizer()
        averages = averages_gradients(str(args.optim), self.run.recipe.optim_in_backward)
        self.wrapped = engine.set_up(
            Training(model, self.optimizer, args, self.ranks, max_steps, averages)
        )
        self.optimizer = engine.optimizer
        with settings_refused_by("the schedule", "training.lr_scheduler_type"):
            self.scheduler = make_schedule(args, self.optimizer, max_steps)
        self.follows_metric = "metrics" in inspect.signature(self.scheduler.step).parameters
        # What the recipe gives the optimizer; a checkpoint's values take its place.
        self.group_options = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self.optimizer.param_groups
        ]
        self.state = self.new_state()
        if checkpoint is not None:
            self.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE))
            engine.load_state(checkpoint, self.state.global_step)
            load_schedule(self.scheduler, checkpoint, self.state.global_step, args)
        self.state.compute_steps(args, max_steps)  # the recipe's intervals, not the checkpoint's
        self.state.max_steps, self.state.num_train_epochs = max_steps, self.epochs.num_epochs
        self.state.is_world_process_zero = self.ranks.is_main_process
        self.state.is_local_process_zero = args.local_process_index == 0
        about = self.callbacks
        about.optimizer, about.lr_scheduler = self.optimizer, self.scheduler
        about.train_dataloader = self.loader

    @settings_refused_by("the optimizer", "training.optim")
    def create_optimizer(self) -> torch.optim.Optimizer:
        """Spread the model, and make the optimizer, with masters where nobody else keeps them."""
        model, engine, recipe = self.model, self.engine, self.run.recipe
        engine.place(model, self.args.device)
        self.optimizer = make_optimizer(
            model,
            self.args,
            lora_plus_ratio=recipe.lora.lora_plus_ratio if recipe.lora else None,
            saved_lr_ratio=recipe.lora.saved_lr_ratio if recipe.lora else None,
            part_ratio=ratio_by_part(model, recipe.model.lr_ratios),
            in_backward=recipe.optim_in_backward,
            keeps_masters=recipe.model.master_weights,
            engine_keeps_masters=engine.keeps_masters,
            num_ranks=self.ranks.num_processes,
        )
        return self.optimizer
