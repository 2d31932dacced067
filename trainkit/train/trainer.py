"""The Trainer subclass: our data order, checkpoints, optimizer and accounting in documented seams.

Overridden: the two dataloaders, ``get_batch_samples`` (token counts), ``_prepare_inputs``
(asynchronous copies), ``compute_loss`` (losses per source), ``create_optimizer``,
``evaluation_loop`` (loss per trained token),
``_save_checkpoint`` and ``_save`` (atomic, no pickled arguments), ``log``. Everything else, the
loop itself included, is transformers' (Trainer, 5.17 to 5.23).
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, Trainer, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from trainkit.errors import TrainkitError
from trainkit.models.loss_head import LossHead
from trainkit.train.checkpoints import CheckpointWriter, folder_name, remember_origin
from trainkit.train.meter import Meter
from trainkit.train.optim import MasterWeightOptimizer, needs_master_weights, parameter_groups
from trainkit.train.refusals import settings_refused_by
from trainkit.train.resume.take_up import options_of, save_window
from trainkit.train.sampling import (
    EpochDataLoader,
    FillingDataset,
    RankBatchSampler,
    TrainingData,
    take_counts,
)
from trainkit.train.source_loss import SourceLosses
from trainkit.train.streaming import StreamLoader, StreamState


@dataclass
class StopRequest:
    """Set by a signal; the ranks agree on it at the next logged step."""

    reason: str | None = None


def _source_losses(model: nn.Module, data: TrainingData | None) -> SourceLosses | None:
    return SourceLosses(model, data.sources) if data is not None and data.sources else None


class SftTrainer(Trainer):
    """Trains a causal language model on prepared samples.

    Args:
        model: the model, patched and with adapters attached.
        args: transformers' arguments; ``output_dir`` is the run directory.
        tokenizer: saved with every checkpoint.
        train_data: what to train on.
        eval_data: what ``eval_loss`` is measured on, or None.
        checkpoints: writes checkpoints atomically.
        stop: set from outside to end the run at the next step that all ranks share.
        lora_plus_ratio: see :func:`trainkit.train.optim.parameter_groups`.
        flops_per_token: of one training step, for ``mfu``; None when the peak is unknown.
        peak_flops: of one device.
    """

    optimizer: Any

    def __init__(
        self,
        *,
        model: nn.Module,
        args: TrainingArguments,
        tokenizer: PreTrainedTokenizerBase,
        train_data: TrainingData,
        eval_data: TrainingData | None,
        checkpoints: CheckpointWriter,
        stop: StopRequest,
        lora_plus_ratio: float | None = None,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        self._train_data = train_data
        self._eval_data = eval_data
        self._checkpoints = checkpoints
        self._stop = stop
        self._lora_plus_ratio = lora_plus_ratio
        self._staging: Path | None = None
        self.group_options: list[dict[str, Any]] = []
        self._has_loss_head = any(isinstance(module, LossHead) for module in model.modules())
        self._eval_source_losses = _source_losses(model, eval_data)
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_data.samples,
            eval_dataset=None if eval_data is None else eval_data.samples,
            processing_class=tokenizer,
        )
        self._stream = self._stream_state()
        self.meter = Meter(
            self.accelerator,
            sources=_source_losses(model, train_data),
            stream=self._stream,
            flops_per_token=flops_per_token,
            peak_flops=peak_flops,
        )

    # -- data -----------------------------------------------------------------------------------

    def get_train_dataloader(self) -> EpochDataLoader | StreamLoader:
        """The micro-batches of this rank, in an order that only (seed, epoch) decide."""
        if self._stream is not None:
            args = self.args
            return StreamLoader(
                self._stream,
                self._train_data.collator,
                batch_size=self._train_batch_size,
                seed=args.seed,
                num_workers=args.dataloader_num_workers,
                prefetch_factor=args.dataloader_prefetch_factor,
                pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
            )
        strategy = self.args.train_sampling_strategy
        return self._loader(
            self._train_data,
            self._train_batch_size,
            drop_last=self.args.dataloader_drop_last,
            group_by_length=strategy == "group_by_length",
        )

    def _stream_state(self) -> StreamState | None:
        stream, args = self._train_data.stream, self.args
        if stream is None:
            return None
        # The stream goes on from its own position; there is nothing to pass over.
        args.ignore_data_skip = True
        return StreamState(
            stream,
            Path(str(args.output_dir), "dropped.jsonl"),
            num_slots=max(args.dataloader_num_workers, 1),
            dist_rank=args.process_index,
            world_size=args.world_size,
        )

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Transformers' loop; a stream goes on from where the checkpoint left it."""
        if self._stream is not None and isinstance(resume_from_checkpoint, str):
            self._stream.load(Path(resume_from_checkpoint))
        return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> EpochDataLoader:
        """Every evaluation sample once, dealt out over the ranks."""
        if self._eval_data is None:
            raise TrainkitError(
                "there is nothing to evaluate on", where="data.eval", fix="name a file there"
            )
        return self._loader(self._eval_data, self.args.eval_batch_size)

    def _loader(
        self,
        data: TrainingData,
        batch_size: int,
        *,
        drop_last: bool = False,
        group_by_length: bool = False,
    ) -> EpochDataLoader:
        args = self.args
        sampler = RankBatchSampler(
            data.samples,
            batch_size=batch_size,
            dist_rank=args.process_index,
            world_size=args.world_size,
            drop_last=drop_last,
            group_by_length=group_by_length,
        )
        workers = args.dataloader_num_workers
        return EpochDataLoader(
            FillingDataset(data.samples, data.without_training),
            batch_sampler=sampler,
            collate_fn=data.collator,
            # Workers are forked anew for each epoch: they must see its order.
            num_workers=workers,
            pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
            prefetch_factor=args.dataloader_prefetch_factor if workers > 0 else None,
            # Its own generator: iterating must not move the model's random numbers.
            generator=torch.Generator().manual_seed(args.seed),
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | int | None]:
        """The micro-batches of one optimizer step; their tokens are counted on the way."""
        if self.state.global_step >= self.state.max_steps:
            return [], None  # a finished run was resumed: transformers would train a step more
        started = time.perf_counter()
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.meter.count_step(time.perf_counter() - started)
        for batch in batches:
            self.meter.count_batch(self._take_counts(batch))
        return batches, num_items

    def _take_counts(self, batch: dict[str, Any]) -> Mapping[str, int]:
        """Take the counts out of a batch; a loss head is told how many rows it must compute."""
        counts = take_counts(batch)
        if self._has_loss_head:
            batch["num_trained_tokens"] = counts["num_trained_tokens"]
        return counts

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Copy a batch to the device without waiting for the device to finish its work."""
        device = self.args.device
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
        """Transformers' loss; what each source has of it is summed on the way."""
        sources = self.meter.sources
        if sources is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        source_ids, labels = inputs.pop("source_ids"), inputs["labels"]
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        sources.add(
            source_ids,
            labels,
            outputs.get("logits"),
            label_smoothing=self.args.label_smoothing_factor,
        )
        return (loss, outputs) if return_outputs else loss

    # -- optimizer ------------------------------------------------------------------------------

    @settings_refused_by("the optimizer", "training.optim")
    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Transformers' choice of optimizer, with fp32 masters where nobody else keeps them."""
        target = self.model if model is None else model
        wants_masters = not self.is_deepspeed_enabled and needs_master_weights(target)
        existing: torch.optim.Optimizer | None = self.optimizer
        if existing is not None or not (wants_masters or self._lora_plus_ratio):
            return super().create_optimizer(model)
        optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, target)
        groups = parameter_groups(
            target,
            decay_names=set(self.get_decay_parameter_names(target)),
            weight_decay=self.args.weight_decay,
            learning_rate=self.args.learning_rate,
            lora_plus_ratio=self._lora_plus_ratio,
        )

        def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
            return optimizer_class(groups, **options)

        made = MasterWeightOptimizer(groups, make) if wants_masters else make(groups)
        self.optimizer = made
        return made

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

    @torch.no_grad()
    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The mean loss per trained token over all ranks; no logits are kept.

        transformers averages the means of batches instead, which weighs a short answer in a small
        batch more than a long one, and changes with the batch size.
        """
        model = self.model_wrapped
        was_training = model.training
        model.eval()
        totals = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        one = torch.ones((), device=self.args.device)
        per_source = self._eval_source_losses
        for batch in dataloader:
            counts = self._take_counts(batch)
            inputs = self._prepare_inputs(batch)
            source_ids = inputs.pop("source_ids", None)
            with self.compute_loss_context_manager():
                outputs = model(**inputs, num_items_in_batch=one)
            totals[0] += outputs["loss"].double()
            totals[1] += counts["num_trained_tokens"]
            if per_source is not None and source_ids is not None:
                logits = outputs.get("logits")
                per_source.add(source_ids, inputs["labels"], logits)
        model.train(was_training)
        if per_source is not None:
            totals = torch.cat((totals, per_source.take(totals.device).flatten()))
        totals = self.accelerator.reduce(totals, reduction="sum")
        loss_sum, num_trained, *sums = totals.tolist()
        metrics = {
            f"{metric_key_prefix}_loss": loss_sum / max(num_trained, 1),
            f"{metric_key_prefix}_num_trained_tokens": int(num_trained),
        }
        if per_source is not None:
            metrics |= per_source.rows(sums, f"{metric_key_prefix}_")
        return EvalLoopOutput(None, None, metrics, len(dataloader.dataset))

    # -- the hub --------------------------------------------------------------------------------

    @settings_refused_by("the repository on the hub", "training.push_to_hub")
    def init_hf_repo(self, *arguments: Any, **keywords: Any) -> None:
        """Make the repository; a hub out of reach or no login is said with the key."""
        self._make_hub_repository(*arguments, **keywords)

    def _make_hub_repository(self, *arguments: Any, **keywords: Any) -> None:
        super().init_hf_repo(*arguments, **keywords)

    # -- checkpoints ----------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        """Where transformers writes: the staging directory while a checkpoint is being saved."""
        return str(self._staging) if self._staging is not None else super()._get_output_dir(trial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write ``checkpoint-N`` into a staging directory and let it appear whole."""
        step = self.state.global_step
        with self._checkpoints.saving(step, self.accelerator, self.state) as staging:
            self._staging = staging
            try:
                super()._save_checkpoint(model, trial)
                if self._stream is not None:
                    self._stream.save(staging / folder_name(step))
                if step > self._globalstep_last_logged:
                    save_window(staging / folder_name(step), self)
            finally:
                self._staging = None
        self._checkpoints.rotate(self.args.save_total_limit, self.state, self.accelerator)

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        """Save model and tokenizer, without the pickled arguments (they hold tokens and paths)."""
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            target = Path(output_dir or str(self.args.output_dir))
            (target / "training_args.bin").unlink(True)
            remember_origin(target, Path(self.model.config.name_or_path))

    # -- logging --------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add tokens, speed and memory to a training row; stop at the first loss that is no number.

        Raises:
            TrainkitError: the loss or the gradient norm is NaN or infinite. Nothing is saved of it.
        """
        if "loss" in logs:
            figures, is_stopping = self.meter.read(
                self.model, is_stopping=self._stop.reason is not None
            )
            logs.update(figures)
            if is_stopping:
                self._stop.reason = self._stop.reason or "another process was asked to stop"
                self.control.should_save = True
                self.control.should_training_stop = True
            for name in ("loss", "grad_norm"):
                if not np.isfinite(logs.get(name, 0.0)):
                    raise TrainkitError(
                        f"{name} is {logs[name]} at step {self.state.global_step}",
                        where=str(self.args.output_dir),
                        fix="continue from the last checkpoint with a lower learning rate, or find "
                        "the operation with kernels: false or model.dtype: float32",
                    )
        if self._stream is not None:  # transformers counts from the start of this process
            self.state.epoch = self.state.global_step / self.state.max_steps
        super().log(logs, start_time)
