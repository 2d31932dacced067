"""The training algorithm: `Loop.train`, and one step of it, `Loop.step`.

What happens around the steps is in hooks, asked in the order of one list. What differs between
strategies of spreading a run over processes is the engine's. transformers' callbacks are told what
its Trainer tells them; a test holds each figure and weight against that Trainer's.
"""

import inspect
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    PreTrainedTokenizerBase,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    enable_full_determinism,
    get_scheduler,
    set_seed,
)
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, ExportableState
from transformers.utils import logging as transformers_logging

from trainkit.errors import TrainkitError
from trainkit.objectives.batches import BatchCounts, TrainingData, take_counts, take_sample_ids
from trainkit.objectives.objective import LossSetup, Objective, Step
from trainkit.objectives.step_loss import accepts_num_items
from trainkit.parallel import Layout
from trainkit.parallel.engine import Training
from trainkit.parallel.ranks import Ranks
from trainkit.train.checkpoints import TRAINER_STATE, CheckpointWriter
from trainkit.train.data.epochs import EpochPlan
from trainkit.train.data.loaders import sample_loader, stream_loader, stream_state
from trainkit.train.faults.bad_numbers import NumberPolicy
from trainkit.train.faults.signals import StopRequest
from trainkit.train.faults.watch import Watch
from trainkit.train.hooks import Hook
from trainkit.train.log.meter import Meter
from trainkit.train.log.rows import Rows
from trainkit.train.model import prepare_to_train
from trainkit.train.optimizer.finite import hold_back
from trainkit.train.optimizer.make import OptimizerPlan, make_optimizer
from trainkit.train.optimizer.noise import EmbeddingNoise
from trainkit.train.optimizer.optim import needs_master_weights, refuse_float16
from trainkit.train.optimizer.watched import Numbers
from trainkit.train.refusals import settings_refused_by
from trainkit.train.results.evaluations import Evaluations
from trainkit.train.results.hub import Hub
from trainkit.train.resume.random_state import load_random_state
from trainkit.train.resume.take_up import options_of
from trainkit.train.saves import SCHEDULER, Saves, read_weights


class Loop:
    """Trains a causal language model on prepared samples, as an objective says.

    Args:
        model: the model, patched and with adapters attached.
        args: transformers' arguments; ``output_dir`` is the run directory.
        layout: how the run is spread over processes.
        tokenizer: saved with every checkpoint.
        train_data: what to train on.
        eval_data: what ``eval_loss`` is measured on, or None.
        checkpoints: writes checkpoints atomically.
        stop: set from outside to end the run at the next step that all ranks share.
        objective: what is optimised.
        numbers: what to do about a step whose numbers are bad; stop by default.
        warn: tells the user what the run goes on without.
        optimizer_plan: what the recipe says of the optimizer besides ``args``.
        flops_per_token: of one training step, for ``mfu``; None when the peak is unknown.
        peak_flops: of one device.
    """

    hub_kind = Hub
    watch: Watch | None = None
    """Hears how far this rank has come."""

    def __init__(
        self,
        *,
        model: Any,
        args: TrainingArguments,
        layout: Layout,
        tokenizer: PreTrainedTokenizerBase,
        train_data: TrainingData,
        eval_data: TrainingData | None,
        checkpoints: CheckpointWriter,
        stop: StopRequest,
        objective: Objective,
        numbers: NumberPolicy | None = None,
        warn: Callable[[str], None] = lambda _: None,
        optimizer_plan: OptimizerPlan | None = None,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        (enable_full_determinism if args.full_determinism else set_seed)(args.seed)
        transformers_logging.set_verbosity(args.get_process_log_level())
        self.model, self.args, self.layout, self.tokenizer = model, args, layout, tokenizer
        self.train_data, self.eval_data = train_data, eval_data
        self.checkpoints, self.stop = checkpoints, stop
        self.plan, self.engine, self.ranks = (
            optimizer_plan or OptimizerPlan(),
            layout.engine,
            Ranks(args),
        )
        self.engine.receive(model, args)
        model.config.use_cache = args.use_cache
        self.wrapped = model
        self.optimizer: Any = None
        self.scheduler: Any = None
        self.latest_batch: dict[str, Any] | None = None
        self.takes_num_items = accepts_num_items(model)
        self.loss = objective.loss(
            LossSetup(
                model,
                takes_num_items=self.takes_num_items,
                label_smoothing=args.label_smoothing_factor,
                chunk_tokens=self.plan.loss_chunk_tokens,
                keeps_gradient=not self.plan.in_backward,
                train_sources=train_data.sources,
                eval_sources=eval_data.sources if eval_data else (),
            )
        )
        self.stream = stream_state(train_data, args, layout)
        self.meter = Meter(
            self.ranks,
            counts_rows=layout.counts_rows,
            counts_losses=layout.counts_losses,
            own=self.loss.train_metrics,
            stream=self.stream,
            flops_per_token=flops_per_token,
            peak_flops=peak_flops,
        )
        self.numbers = Numbers(self, numbers or NumberPolicy(), warn)
        self.guard = self.numbers.guard
        self.rows, self.evaluations, self.saves = Rows(), Evaluations(), Saves()
        self.hub = self.hub_kind(args, is_main=self.ranks.is_main_process)
        self.hooks: list[Hook] = [
            EmbeddingNoise(), self.numbers, self.rows, self.evaluations, self.saves
        ]  # fmt: skip
        trackers = get_reporting_integration_callbacks(args.report_to)
        self.callbacks = CallbackHandler(
            [DefaultFlowCallback, *trackers], model, tokenizer, None, None
        )
        self.add_callback, self.remove_callback = (
            self.callbacks.add_callback,
            self.callbacks.remove_callback,
        )
        self.control = TrainerControl()
        self.state = self._new_state()
        self.event("on_init_end")

    # -- the algorithm ----------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | Path | None = None) -> TrainerState:
        """All steps, from the first one or from behind a checkpoint's."""
        checkpoint = None if resume_from_checkpoint is None else Path(resume_from_checkpoint)
        try:
            self._train(checkpoint)
        except Exception:
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
            load_random_state(checkpoint, self.args)
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
        """One optimizer step."""
        args, state, engine = self.args, self.state, self.engine
        started = time.perf_counter()
        micro = self.take(batches)
        seconds = time.perf_counter() - started
        samples = [take_sample_ids(batch) for batch in micro]
        counts = [self.take_counts(batch) for batch in micro]
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
        self.rate = self._rate()
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
        """A micro-batch's part of the step's loss.

        Args:
            model: as it is called in training.
            batch: on the device.
            num_items: what the step's losses are divided by.
            parts: micro-batches of the step.
        """
        divides = not self.takes_num_items
        step = Step(
            num_items=num_items,
            num_micro_batches=parts,
            num_ranks=self._num_ranks,
            trainer_divides=divides,
            trainer_loss=self._model_loss,
        )
        with self.sharing():
            loss, _ = self.loss.training(model, batch, step)
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            torch.cuda.empty_cache()
        return loss / parts if divides else loss

    @property
    def is_over(self) -> bool:
        """Whether no step follows in this epoch."""
        control, state = self.control, self.state
        is_stopped = control.should_epoch_stop or control.should_training_stop
        return is_stopped or state.global_step >= state.max_steps

    # -- parts of a step --------------------------------------------------------------------------

    def take(self, batches: Iterator[Any]) -> list[dict[str, Any]]:
        """The micro-batches of the next step; the last one of an epoch may have fewer."""
        return list(itertools.islice(batches, self.args.gradient_accumulation_steps))

    def take_counts(self, batch: dict[str, Any]) -> BatchCounts:
        """What is in a batch, which is the model's then."""
        return take_counts(batch, self.loss.num_items)

    def _prepared(self, micro: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for number, batch in enumerate(micro):
            if number:
                self.event("on_substep_end")
            yield self.prepare(batch)

    def prepare(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Copy a batch to the device without waiting for the device to finish its work."""
        if self.watch is not None:
            self.watch.mark("training" if self.model.training else "evaluating")
        self.latest_batch, rows, device = batch, self.layout.rows, self.args.device
        inputs = batch if rows is None else rows.part(batch)
        return {
            name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
            for name, value in inputs.items()
        }

    def sharing(self) -> Any:
        """Within, attention knows where ranks have a part of each row."""
        return nullcontext() if self.layout.rows is None else self.layout.rows.at_work()

    def _num_items(self, counts: Sequence[BatchCounts]) -> torch.Tensor:
        """What a step's losses are divided by: the items of its rows, those of all data ranks."""
        count = torch.tensor(sum(each.num_items for each in counts), device=self.args.device)
        if self.args.average_tokens_across_devices:
            mine = count if self.layout.counts_rows else torch.zeros_like(count)
            count = self.ranks.reduce(mine)
        return count / 1  # as a fraction, since it divides fractions

    @property
    def _num_ranks(self) -> int:
        """Ranks with a part of what is divided by the denominator; gradients are averaged."""
        of_all = self.args.average_tokens_across_devices
        return self.layout.loss_ranks if of_all else self.layout.options.sequence

    def _model_loss(
        self, model: nn.Module, inputs: dict[str, Any], num_items: torch.Tensor | int | None
    ) -> tuple[torch.Tensor, Any]:
        """What the model returns, times the ranks that have a part of it; and its outputs."""
        is_counted = self.takes_num_items and num_items is not None
        outputs = model(**inputs, **({"num_items_in_batch": num_items} if is_counted else {}))
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
        return (loss * self._num_ranks if is_counted else loss), outputs

    def _watch_loss(self, loss: torch.Tensor) -> torch.Tensor | None:
        """Tell the guard, and optimizers that step in the backward pass."""
        factor = self.guard.add_loss(loss)
        if self.plan.in_backward:
            self.optimizer.block(~(loss if factor is None else loss * factor).isfinite())
        return factor

    def _judge(self, norm: torch.Tensor | float | None, optimizer: Any) -> None:
        """The verdict on a step's numbers; a bad step of ``optimizer`` is held back."""
        guard, step = self.guard, self.state.global_step + 1
        found_inf = guard.close(step, norm, forgives_gradients=self.args.fp16)
        if optimizer is not None:
            hold_back(optimizer, found_inf, guard.flush, lambda: guard.is_held)

    def _rate(self) -> float:
        if self.follows_metric:
            return float(self.optimizer.param_groups[0]["lr"])
        rate = self.scheduler.get_last_lr()[0]
        return rate.item() if isinstance(rate, torch.Tensor) else rate

    # -- before the first step --------------------------------------------------------------------

    def train_batches(self) -> Any:
        """The micro-batches of this rank, in an order that only (seed, epoch) decide."""
        args, size = self.args, self.args.train_batch_size
        if self.stream is not None:
            return stream_loader(self.train_data, self.stream, args, size)
        return sample_loader(
            self.train_data,
            args,
            self.layout,
            size,
            drop_last=args.dataloader_drop_last,
            group_by_length=args.train_sampling_strategy == "group_by_length",
        )

    def eval_batches(self) -> Any:
        """Every evaluation sample once, dealt out over the ranks."""
        if self.eval_data is None:
            raise TrainkitError(
                "there is nothing to evaluate on", where="data.eval", fix="name a file there"
            )
        return sample_loader(self.eval_data, self.args, self.layout, self.args.eval_batch_size)

    def _make(self, checkpoint: Path | None) -> None:
        """Weights, placement, optimizer, schedule, state: in this order."""
        args, engine, model = self.args, self.engine, self.model
        if self.stream is not None and checkpoint is not None:
            self.stream.load(checkpoint)
        self.loader = self.train_batches()
        self.epochs = EpochPlan.of(self.loader, args, is_equal=self.train_data.has_equal_epochs)
        max_steps = self.epochs.max_steps
        prepare_to_train(model, self.tokenizer, args)
        if checkpoint is not None:
            engine.load_weights(model, partial(read_weights, model, checkpoint))
        self.create_optimizer()
        averages = self.plan.reduces_gradients(str(args.optim))
        self.wrapped = engine.set_up(
            Training(model, self.optimizer, args, self.ranks, max_steps, averages)
        )
        self.optimizer = engine.optimizer
        with settings_refused_by("the schedule", "training.lr_scheduler_type"):
            self.scheduler = get_scheduler(
                args.lr_scheduler_type,
                optimizer=self.optimizer,
                num_warmup_steps=args.get_warmup_steps(max_steps),
                num_training_steps=max_steps,
                scheduler_specific_kwargs=args.lr_scheduler_kwargs,
            )
        self.follows_metric = "metrics" in inspect.signature(self.scheduler.step).parameters
        # What the recipe gives the optimizer; a checkpoint's values take its place.
        self.group_options = options_of(self.optimizer.param_groups)
        self.state = self._new_state()
        if checkpoint is not None:
            self.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE))
            engine.load_state(checkpoint)
            if (checkpoint / SCHEDULER).is_file():
                schedule = torch.load(checkpoint / SCHEDULER, weights_only=True)
                self.scheduler.load_state_dict(schedule)
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
        model, engine = self.model, self.engine
        engine.place(model, self.args.device)
        if not engine.keeps_masters and needs_master_weights(model) and not self.args.fp16:
            refuse_float16(model)
        self.optimizer = make_optimizer(
            model,
            self.args,
            self.plan,
            engine_keeps_masters=engine.keeps_masters,
            num_ranks=self.ranks.num_processes,
        )
        return self.optimizer

    def exported(self) -> list[Any]:
        """Callbacks whose state is saved."""
        every = [*self.callbacks.callbacks, self.control]
        return [each for each in every if isinstance(each, ExportableState)]

    def _new_state(self) -> TrainerState:
        state = TrainerState(
            stateful_callbacks=self.exported(),
            is_local_process_zero=self.args.local_process_index == 0,
            is_world_process_zero=self.ranks.is_main_process,
        )
        state.train_batch_size = self.args.train_batch_size
        return state

    # -- what others ask --------------------------------------------------------------------------

    def event(self, name: str, *given: Any) -> None:
        """Tell transformers' callbacks."""
        self.control = getattr(self.callbacks, name)(self.args, self.state, self.control, *given)

    def tell(self, name: str, *given: Any) -> None:
        """Ask our hooks, in order."""
        for hook in self.hooks:
            getattr(hook, name)(self, *given)

    def log(self, row: dict[str, float]) -> None:
        """Keep a row of figures, and tell of it."""
        self.rows.log(self, row)

    def evaluate(self) -> dict[str, float]:
        """What is due to be measured; all ranks call it."""
        return self.evaluations.measure(self)

    def save_model(self, folder: str | Path) -> None:
        """Write the model as ``from_pretrained`` reads it; all ranks call it."""
        self.saves.save_model(self, Path(folder))

    def loss_of(self, batch: dict[str, Any]) -> torch.Tensor:
        """The loss of a batch by itself, counts included; nothing is logged or watched."""
        batch = {name: value for name, value in batch.items() if name != "source_ids"}
        counts = self.take_counts(batch)
        with self.sharing():
            return self.loss.evaluate(self.model, self.prepare(batch), counts.num_items).loss_sum

    @property
    def latest_rows(self) -> list[str]:
        """The rows, by name, of the micro-batch that was begun last."""
        return self.guard.rows_of(self.latest_batch)

    @property
    def keeps_masters(self) -> bool:
        """Whether half-precision weights that train have fp32 copies."""
        return self.engine.keeps_masters or self.plan.keeps_masters
