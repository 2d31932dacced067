"""The Trainer subclass: our data order, checkpoints, optimizer and accounting in documented seams.

What is optimised is the objective's: its loss is asked in ``get_batch_samples`` (what is counted),
``compute_loss`` and ``evaluation_loop``.

Overridden besides: the two dataloaders, ``_prepare_inputs`` (asynchronous copies),
``training_step`` and ``_clip_grad_norm`` (fp32 gradients), ``create_optimizer``, ``log``, and what
`WatchedNumbers` (no step with a bad number), `BackgroundSaves` (whole checkpoints, no pickled
arguments), `CountedEpochs`, `PlacedWeights`, `SharedRows` and `HubUploads` have. The rest is
transformers' (Trainer, 5.17 to 5.23).
"""

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from trainkit.errors import TrainkitError
from trainkit.objectives.batches import BatchCounts, TrainingData, take_counts, take_sample_ids
from trainkit.objectives.evaluation import Evaluation
from trainkit.objectives.objective import LossSetup, Objective, Step
from trainkit.parallel import Layout
from trainkit.train.checkpoints import CheckpointWriter, folder_name
from trainkit.train.data.epochs import CountedEpochs
from trainkit.train.data.loaders import sample_loader, stream_loader, stream_state
from trainkit.train.data.sampling import EpochDataLoader
from trainkit.train.data.streaming import StreamLoader
from trainkit.train.faults.bad_numbers import NumberPolicy
from trainkit.train.faults.signals import StopRequest
from trainkit.train.log.meter import Meter
from trainkit.train.optimizer.make import GradientHolder, OptimizerPlan, make_optimizer
from trainkit.train.optimizer.optim import (
    MasterWeightOptimizer,
    needs_master_weights,
    refuse_float16,
)
from trainkit.train.optimizer.watched import WatchedNumbers
from trainkit.train.placed import PlacedWeights
from trainkit.train.refusals import settings_refused_by
from trainkit.train.results.hub import HubUploads
from trainkit.train.resume.take_up import options_of, save_window
from trainkit.train.saves import BackgroundSaves
from trainkit.train.shared import SharedRows
from trainkit.train.staged import StagedSteps

KEPT_ROWS = 1000
"""Logged rows that the Trainer's state keeps, so that a save does not grow with the run."""


class ObjectiveTrainer(
    WatchedNumbers,
    HubUploads,
    BackgroundSaves,
    SharedRows,
    PlacedWeights,
    StagedSteps,
    CountedEpochs,
):
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

    optimizer: Any

    def __init__(
        self,
        *,
        model: nn.Module,
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
        self.layout = layout
        self.train_data = train_data
        self._eval_data = eval_data
        self.checkpoints = checkpoints
        self._stop = stop
        self._optimizer_plan = optimizer_plan or OptimizerPlan()
        self.latest_batch: dict[str, Any] | None = None
        self.group_options: list[dict[str, Any]] = []
        self._has_equal_epochs = train_data.has_equal_epochs or train_data.stream is not None
        self._masters: GradientHolder | None = None
        layout.engine.keep_part(model)
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_data.samples,
            eval_dataset=None if eval_data is None else eval_data.samples,
            processing_class=tokenizer,
        )
        self._loss = objective.loss(
            LossSetup(
                model,
                takes_num_items=self.model_accepts_loss_kwargs,
                label_smoothing=args.label_smoothing_factor,
                chunk_tokens=self._optimizer_plan.loss_chunk_tokens,
                keeps_gradient=not self._optimizer_plan.in_backward,
                train_sources=train_data.sources,
                eval_sources=eval_data.sources if eval_data else (),
            )
        )
        self.label_smoother = None  # ours is the same for training and evaluation
        self.watch_numbers(numbers, train_data.sample_name, stop, warn)
        self._stream = stream_state(train_data, args, layout)
        self.meter = Meter(
            self.accelerator,
            counts_rows=layout.counts_rows,
            counts_losses=layout.counts_losses,
            own=self._loss.train_metrics,
            stream=self._stream,
            flops_per_token=flops_per_token,
            peak_flops=peak_flops,
        )

    # -- data -----------------------------------------------------------------------------------

    def get_train_dataloader(self) -> EpochDataLoader | StreamLoader:
        """The micro-batches of this rank, in an order that only (seed, epoch) decide."""
        args = self.args
        if self._stream is not None:
            return stream_loader(self.train_data, self._stream, args, self._train_batch_size)
        return sample_loader(
            self.train_data,
            args,
            self.layout,
            self._train_batch_size,
            drop_last=args.dataloader_drop_last,
            group_by_length=args.train_sampling_strategy == "group_by_length",
        )

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Transformers' loop; a stream goes on from where the checkpoint left it."""
        if isinstance(resume_from_checkpoint, str):
            self._numbers.load(Path(resume_from_checkpoint))
            if self._stream is not None:
                self._stream.load(Path(resume_from_checkpoint))
        try:
            result = super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
            self._guard.flush()
        except Exception:
            self.checkpoints.settle()
            raise
        self.checkpoints.wait()
        return result

    def get_eval_dataloader(self, eval_dataset: Any = None) -> EpochDataLoader:
        """Every evaluation sample once, dealt out over the ranks."""
        if self._eval_data is None:
            raise TrainkitError(
                "there is nothing to evaluate on", where="data.eval", fix="name a file there"
            )
        return sample_loader(self._eval_data, self.args, self.layout, self.args.eval_batch_size)

    # -- steps ----------------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | int | None]:
        """The micro-batches of one optimizer step; what the loss is a mean of is counted."""
        if self.state.global_step >= self.state.max_steps:
            return [], None  # a finished run was resumed: transformers would train a step more
        started = time.perf_counter()
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.meter.count_step(time.perf_counter() - started)
        samples = [take_sample_ids(batch) for batch in batches]
        counts = [self._take_counts(batch) for batch in batches]
        self._begin_step(samples, batches)
        for each in counts:
            self.meter.count_batch(each)
        is_shared = self.layout.data_size < self.accelerator.num_processes
        if not self._loss.trainer_counts or (is_shared and num_items is not None):
            num_items = self._count_items(counts, device)
        if self._masters is not None and self.accelerator.scaler is not None:
            self._masters.zero_grad()  # those of a step that the loss scaler has skipped
        return batches, num_items

    def _take_counts(self, batch: dict[str, Any]) -> BatchCounts:
        return take_counts(batch, self._loss.num_items)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Copy a batch to the device without waiting for the device to finish its work."""
        if self.watch is not None:
            self.watch.mark("training" if self.model.training else "evaluating")
        self.latest_batch, device = inputs, self.args.device
        if self.layout.rows is not None:
            inputs = self.layout.rows.part(inputs)
        return {
            name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
            for name, value in inputs.items()
        }

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The objective's loss, watched: a micro-batch's part of the step's."""
        loss, outputs = self.objective_loss(model, inputs, num_items_in_batch)
        has_counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        loss = self._watched(loss, 1 if has_counted else self.current_gradient_accumulation_steps)
        if self._optimizer_plan.in_backward and isinstance(self._masters, MasterWeightOptimizer):
            self._masters.block(~loss.detach().isfinite())
        return (loss, outputs) if return_outputs else loss

    def objective_loss(
        self, model: nn.Module, inputs: dict[str, Any], num_items: torch.Tensor | int | None
    ) -> tuple[torch.Tensor, Any]:
        """A micro-batch's part of the step's loss, and what the model returns."""
        step = Step(
            num_items=num_items,
            num_micro_batches=self.current_gradient_accumulation_steps,
            num_ranks=self._num_ranks,
            trainer_divides=not (self.model_accepts_loss_kwargs and num_items is not None),
            trainer_loss=self._trainer_loss,
        )
        return self._loss.training(model, inputs, step)

    def loss_of(self, batch: dict[str, Any]) -> torch.Tensor:
        """The loss of a batch by itself, counts included; nothing is logged or watched."""
        batch = {name: value for name, value in batch.items() if name != "source_ids"}
        counts = self._take_counts(batch)
        inputs = self._prepare_inputs(batch)
        return self._loss.evaluate(self.model, inputs, counts.num_items).loss_sum

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """One micro-batch forth and back; its loss is watched without waiting for it."""
        if self._masters is not None:
            accumulates = self.args.gradient_accumulation_steps > 1
            self._masters.begin_micro_batch(model, accumulates=accumulates)
        with self._guard.explaining():
            return self.staged_step(model, inputs, num_items_in_batch)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Clip where the gradients are: the fp32 masters have them, where there are some."""
        norm = self._own_norm(self.args.max_grad_norm)
        return super()._clip_grad_norm(self._holder_of_gradients(model)) if norm is None else norm

    def _own_norm(self, max_norm: float) -> torch.Tensor | None:
        """Of an optimizer that clips by itself, or has let go of the gradients."""
        return None if self._masters is None else self._masters.clip(max_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The norm that Trainer logs, and the verdict on the step."""
        norm = self._own_norm(math.inf) if grad_norm is None else grad_norm
        return super()._get_grad_norm(model, norm)

    # -- optimizer ------------------------------------------------------------------------------

    @settings_refused_by("the optimizer", "training.optim")
    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Transformers' choice of optimizer, with fp32 masters where nobody else keeps them."""
        self.place()
        target = self.model if model is None else model
        wants_masters = not self.layout.keeps_masters and needs_master_weights(target)
        if wants_masters and self.accelerator.scaler is None:
            refuse_float16(target)
        existing: torch.optim.Optimizer | None = self.optimizer
        if existing is not None:
            return existing
        self.optimizer = make_optimizer(
            target,
            self.args,
            self._optimizer_plan,
            decay_names=set(self.get_decay_parameter_names(target)),
            engine_keeps_masters=self.layout.keeps_masters,
            num_ranks=self.accelerator.num_processes,
        )
        if isinstance(self.optimizer, GradientHolder):
            self._masters = self.optimizer
        return self.optimizer

    @property
    def keeps_masters(self) -> bool:
        """Whether half-precision weights that train have fp32 copies."""
        return self.layout.keeps_masters or self._optimizer_plan.keeps_masters

    @property
    def has_no_wrapper(self) -> bool:
        """The engine spreads the weights itself, or the optimizer averages the gradients."""
        return super().has_no_wrapper or self._optimizer_plan.reduces_gradients(
            str(self.args.optim)
        )

    @settings_refused_by("the schedule", "training.lr_scheduler_type")
    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        """Transformers' schedule; notes what the recipe gives the optimizer on the way."""
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        # A checkpoint's values take their place after this. In place: DeepSpeed calls a copy of us.
        chosen = self.optimizer if optimizer is None else optimizer
        self.group_options[:] = options_of(chosen.param_groups)
        return scheduler

    # -- evaluation -----------------------------------------------------------------------------

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The mean loss over all ranks, as the objective takes it; no logits are kept."""
        self._guard.flush()
        evaluation = Evaluation(
            self.evaluated_in_stages(self._loss),
            self.accelerator,
            take_counts=self._take_counts,
            prepare=self._prepare_inputs,
            autocast=self.compute_loss_context_manager,
            counts_rows=self.layout.counts_rows,
            counts_losses=self.layout.counts_losses,
        )
        loss = evaluation.measure(self.model_wrapped, dataloader, metric_key_prefix)
        return EvalLoopOutput(None, None, {**loss, **self.take_figures()}, len(dataloader.dataset))

    # -- checkpoints ----------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Only where every number is one."""
        self.check_numbers(folder_name(self.state.global_step))
        super()._save_checkpoint(model, trial)

    def write_own_state(self, directory: Path) -> None:
        """Where the stream is, and what was counted since the last logged row."""
        if self._stream is not None:
            self._stream.save(directory)
        if self.args.should_save:
            self._numbers.save(directory)
        if self._stop.misses_evaluation or self.state.global_step > self._globalstep_last_logged:
            save_window(directory, self)

    # -- logging --------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add tokens, speed and memory to a training row.

        Raises:
            NumberError: the loss or the gradient norm is NaN or infinite. Nothing is saved of it.
        """
        if "loss" in logs:
            self._guard.flush()
            logs.update(self.meter.read(self.model))
            logs.update(self.waiting())
            self._leave_out_skipped(logs)
        if self._stream is not None:  # transformers counts from the start of this process
            self.state.epoch = self.state.global_step / self.state.max_steps
        super().log(logs, start_time)
        self._forget_rows()

    def _forget_rows(self) -> None:
        """Keep the first row and the last ones; metrics.jsonl has all of them."""
        rows = self.state.log_history
        if len(rows) > 2 * KEPT_ROWS:
            del rows[1:-KEPT_ROWS]
