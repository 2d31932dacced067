"""The Trainer's seams for checkpoints: what is saved is copied, and written in the background.

A step waits only for the copy to host memory: of the weights that are saved, and of this rank's
part of the optimizer. So a host needs, besides, as much memory as its ranks' parts of a checkpoint.
"""

import random
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import DeepSpeedSchedulerWrapper
from peft import PeftModel, get_peft_model_state_dict
from torch import nn
from transformers import Trainer
from transformers.trainer_utils import SaveStrategy

from trainkit.parallel import Layout
from trainkit.parallel.snapshot import pin_ahead, snapshot, tensors_of
from trainkit.train.background import Save
from trainkit.train.checkpoints import BASE, CheckpointWriter, folder_name, remember_origin
from trainkit.train.faults.signals import StopRequest
from trainkit.train.faults.watch import Watch

_OPTIMIZER, _SCHEDULER = "optimizer.pt", "scheduler.pt"
_AT_AN_END = {"load_best_model_at_end": False, "save_total_limit": None}
"""What leaves the checkpoints as they are, and the model."""


class BackgroundSaves(Trainer):
    """A Trainer whose checkpoints are written while it goes on; set both before it is made."""

    layout: Layout
    checkpoints: CheckpointWriter
    _stop: StopRequest
    watch: Watch | None = None
    _staging: Path | None = None
    _saving: Save | None = None
    _has_pinned = False
    _trained: list[nn.Parameter] | None = None
    _adapter: tuple[tuple[int, ...], dict[str, Any]] | None = None

    def write_own_state(self, directory: Path) -> None:
        """Write what else continues the run: small files."""

    def _get_output_dir(self, trial: Any) -> str:
        """Where transformers writes: the staging directory while a checkpoint is being saved."""
        return str(self._staging) if self._staging is not None else super()._get_output_dir(trial)

    def _maybe_log_save_evaluate(self, *arguments: Any, **keywords: Any) -> None:
        """After the first step, when the optimizer has its states, make ready for the first save.

        Else that save would take seconds: see `pin_ahead`.
        """
        if not self._has_pinned and self.args.save_strategy != SaveStrategy.NO:
            pin_ahead(self.copied_by_a_save())
        self._has_pinned = True
        super()._maybe_log_save_evaluate(*arguments, **keywords)

    def copied_by_a_save(self) -> list[torch.Tensor]:
        """The tensors that this rank copies for a checkpoint, as often as it copies them."""
        engine, found = self.layout.engine, []
        if engine.places_weights:
            return []  # writes at once
        if self.args.should_save and not engine.shards_weights:
            found += tensors_of(self._saved_weights())
            if engine.shards_optimizer:
                found += found  # in a file of the engine's, too
        if engine.shards_optimizer:
            optimizer = self.optimizer
            while hasattr(optimizer, "optimizer"):
                optimizer = optimizer.optimizer
            # The keys are the weights in full precision, which it trains.
            found += tensors_of([list(optimizer.state), list(optimizer.state.values())])
        elif self.args.should_save:
            found += tensors_of(self.optimizer.state_dict())
        return found

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Copy what makes ``checkpoint-N``, and let it appear whole when it is written."""
        step = self.state.global_step
        slowly = nullcontext() if self.watch is None else self.watch.slow("saving")
        saving = self.checkpoints.saving(
            step,
            self.accelerator,
            self.state,
            limit=self.args.save_total_limit,
            keep=self.uploading,
        )
        with slowly, saving as save:
            self._staging, self._saving = save.directory.parent, save
            try:
                with self.layout.engine.deferring_writes(save.defer):
                    super()._save_checkpoint(model, trial)
                save.attempt(partial(self.write_own_state, save.directory))
            finally:
                self._staging = self._saving = None
        if self.args.push_to_hub:
            self.checkpoints.wait()
            self.push_checkpoint(self.checkpoints.root / folder_name(step))

    def push_checkpoint(self, checkpoint: Path) -> None:
        """Upload it."""

    @property
    def uploading(self) -> Path | None:
        """A checkpoint that is being uploaded, and has to stay."""
        return None

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Where each rank has the whole model, without an engine's copy of all of it."""
        engine = self.layout.engine
        is_whole_here = engine.shards_optimizer and not engine.shards_weights
        if self._saving is None or engine.places_weights or not is_whole_here:
            super().save_model(output_dir, _internal_call)
        else:
            self._save(output_dir)

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        """Save model and tokenizer; a given ``state_dict`` is a copy already."""
        save = self._saving
        if save is None:
            self._save_now(output_dir, state_dict)
        elif self.layout.engine.places_weights or not self.args.should_save:
            save.attempt(partial(self._save_now, output_dir, state_dict))
        else:
            weights = snapshot(self._saved_weights()) if state_dict is None else state_dict
            save.defer(None, partial(self._save_now, output_dir, weights))

    def _save_now(self, output_dir: str | None, state_dict: dict[str, Any] | None) -> None:
        """Without the pickled arguments: they hold tokens and paths."""
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            target = Path(output_dir or str(self.args.output_dir))
            (target / "training_args.bin").unlink(True)
            base = Path(self.model.config.name_or_path)
            remember_origin(target, base, self.checkpoints.fingerprint.get(BASE))

    def _saved_weights(self) -> dict[str, Any]:
        """What ``save_pretrained`` writes of the model's state; of a frozen base, nothing."""
        if not isinstance(self.model, PeftModel):
            return dict(self.model.state_dict())
        if self._trained is None:
            # Going through a thousand modules takes longer than all else of an adapter's save.
            self._trained = [each for each in self.model.parameters() if each.requires_grad]
        places = tuple(each.data_ptr() for each in self._trained)
        if self._adapter is None or self._adapter[0] != places:
            self._adapter = places, self._adapter_weights()
        return dict(self._adapter[1])

    def _adapter_weights(self) -> dict[str, Any]:
        weights: dict[str, Any] = self.model.state_dict()
        kept = get_peft_model_state_dict(self.model, state_dict=weights)
        places = {tensor.data_ptr() for tensor in kept.values()}
        return {
            name: tensor
            for name, tensor in weights.items()
            if isinstance(tensor, torch.Tensor) and tensor.data_ptr() in places
        }

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """This rank's part of the optimizer, and the schedule."""
        save, folder = self._saving, Path(output_dir)
        if save is None or self.layout.engine.places_weights:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        is_engines = self.layout.engine.shards_optimizer
        if is_engines:
            is_adapter = isinstance(self.model, PeftModel)
            self.layout.engine.save_shards(self.model_wrapped, folder, only_trained=is_adapter)
        elif self.args.should_save:
            state = snapshot(self.optimizer.state_dict())
            save.defer(folder / _OPTIMIZER, partial(torch.save, state, folder / _OPTIMIZER))
        # DeepSpeed's own schedule is in its shards.
        has_own = not is_engines or not isinstance(self.lr_scheduler, DeepSpeedSchedulerWrapper)
        if self.args.should_save and has_own:
            state = snapshot(self.lr_scheduler.state_dict())
            save.defer(folder / _SCHEDULER, partial(torch.save, state, folder / _SCHEDULER))

    def _save_scaler(self, output_dir: str) -> None:
        """A few numbers."""
        self._small(partial(super()._save_scaler, output_dir))

    def _save_rng_state(self, output_dir: str) -> None:
        """Of every rank, a file; as transformers reads it."""
        if self._saving is None:
            super()._save_rng_state(output_dir)
            return
        is_alone = self.args.world_size <= 1
        state = _random_state(all_gpus=not is_alone)
        path = Path(output_dir, f"rng_state{'' if is_alone else f'_{self.args.process_index}'}.pth")
        self._saving.defer(path, partial(torch.save, state, path))

    def _small(self, job: Any) -> None:
        if self._saving is None:
            job()
        else:
            self._saving.attempt(job)

    def _finalize_training(self, *arguments: Any) -> Any:
        """A run that was asked to stop will go on: from its last checkpoint, not from the best.

        At an end transformers loads the best one, and with ``save_total_limit: 1`` removes all
        others.
        """
        self.checkpoints.wait()
        before = {name: getattr(self.args, name) for name in _AT_AN_END}
        try:
            if self._stop.has_saved:
                self._set(_AT_AN_END)
            return super()._finalize_training(*arguments)
        finally:
            self._set(before)

    def _set(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            setattr(self.args, name, value)

    def _load_best_model(self) -> None:
        """When it is written."""
        self.checkpoints.wait()
        super()._load_best_model()


def _random_state(*, all_gpus: bool) -> dict[str, Any]:
    """Of every generator that a run draws from, as transformers sets it again."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        of_gpus = torch.cuda.get_rng_state_all if all_gpus else torch.cuda.get_rng_state
        state["cuda"] = of_gpus()
    return state
