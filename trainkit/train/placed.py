"""The Trainer's seams for engines that place the weights themselves: FSDP2.

transformers then wraps nothing, saves no optimizer and loads no weights: each rank has a part, and
the engine knows which.
"""

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from peft.utils import SAFETENSORS_WEIGHTS_NAME as ADAPTER_NAME
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel, Trainer
from transformers.utils import SAFE_WEIGHTS_NAME

from trainkit.models.loading import load_model
from trainkit.options import ModelOptions
from trainkit.parallel import Layout

_SCHEDULER = "scheduler.pt"


def _on_numbered_cpu(storage: Any, location: str) -> Any:
    return storage if location.startswith("cpu:") else None


# transformers 5.17 loads the optimizer of several ranks onto `cpu:0`, a place that torch.load does
# not know; 5.23 says `cpu`.
torch.serialization.register_package(11, lambda _: None, _on_numbered_cpu)


def take_renamed(model: Any, folder: Path) -> None:
    """Take up saved weights whose names in the files are not the model's.

    transformers saves some classes under other names than they run with, experts one by one, and
    its Trainer leaves out what it does not find when it loads: a continued run would go on, and a
    best model be saved, with experts of another step.

    Args:
        model: as it trains; an adapter's files have its own names.
        folder: a checkpoint, or a saved model.
    """
    files = sorted(folder.glob("model*.safetensors"))
    own = model.state_dict() if isinstance(model, PreTrainedModel) else {}
    if all(name in own for file in files for name in names_in(file)) or not own:
        return
    saved = load_model(
        ModelOptions(name_or_path=str(folder), dtype="auto"), attention="eager"
    ).state_dict()
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(saved[name])


def names_in(file: Path) -> list[str]:
    """Of the tensors in a file."""
    with safe_open(file, "pt") as opened:
        return list(opened.keys())


class Placed(nn.Module):
    """Stands for a model that is spread already, so that nobody wraps it again."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        return self.module(*args, **kwargs)


class PlacedWeights(Trainer):
    """A Trainer whose engine may place the weights; set ``layout`` before this is initialised."""

    layout: Layout
    _is_placed = False

    def place(self) -> None:
        """Spread the model over the ranks, once, before the optimizer is made."""
        if not self._is_placed:
            self._is_placed = True
            engine, device = self.layout.engine, self.args.device
            if engine.runs_steps:
                engine.place_stages(self.model, device, self.accelerator.autocast)
            else:
                engine.place(self.model, device)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Not what has no memory yet: its parts are read onto the device in `place`."""
        if not any(parameter.is_meta for parameter in model.parameters()):
            super()._move_model_to_device(model, device)

    @property
    def has_no_wrapper(self) -> bool:
        """Nobody may wrap the model: the engine spreads its weights itself."""
        return self.layout.engine.places_weights

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        """Autocast as for any model, and nothing around it."""
        if not self.has_no_wrapper:
            return super()._wrap_model(model, training, dataloader)
        if isinstance(model, Placed):
            return model
        prepared = self.accelerator.prepare_model(
            self.model, device_placement=False, evaluation_mode=True
        )
        return Placed(prepared)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As ``from_pretrained`` reads it, in the dtype that the model was loaded in."""
        engine = self.layout.engine
        is_adapter = isinstance(self.model, PeftModel)
        if engine.runs_steps:
            self._save_parts(Path(output_dir or str(self.args.output_dir)))
            return
        weights = engine.whole_weights(
            self.model, keep=bool(self.args.should_save), adapters_only=is_adapter
        )
        if weights is None:
            super().save_model(output_dir, _internal_call)
            return
        if not self.args.should_save:
            return
        self._save(output_dir, weights)
        if not is_adapter:
            self._save_config(Path(output_dir or str(self.args.output_dir)))

    def _save_config(self, folder: Path) -> None:
        """With the dtype of the weights; save_pretrained has written that of the fp32 shards."""
        self.model.config.dtype = self.saved_dtype
        self.model.config.save_pretrained(folder)

    def _save_parts(self, folder: Path) -> None:
        """Each rank's weights next to the others', or all adapters; and the configuration."""
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(self.model, PeftModel):
            # peft looks for adapters in the modules that this rank has.
            adapters = self.layout.engine.gather(get_peft_model_state_dict(self.model))
            if self.args.should_save:
                self._save(str(folder), {})  # what it would write itself are parts
                save_file(adapters, folder / ADAPTER_NAME, metadata={"format": "pt"})
            return
        if self.args.should_save:
            self._save(str(folder), {})
            (folder / SAFE_WEIGHTS_NAME).unlink(missing_ok=True)  # holds nothing
            self._save_config(folder)
        self.layout.engine.write_weights(self.model, folder)

    @property
    def saved_dtype(self) -> torch.dtype:
        """The dtype that ``from_pretrained`` is to load a saved model in."""
        name, parameter = next(iter(self.model.named_parameters()))
        return self.layout.engine.saved_dtype(name, parameter)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """The engine's parts, and transformers' schedule."""
        engine = self.layout.engine
        if not engine.places_weights:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        engine.save_state(self.model, self.optimizer, Path(output_dir))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, _SCHEDULER))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Not yet where the engine does: it has placed nothing so far."""
        if not self.layout.engine.places_weights:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            take_renamed(self.model if model is None else model, Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Weights, optimizer and schedule, in this order."""
        engine = self.layout.engine
        if checkpoint is None or not engine.places_weights:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        engine.load_state(self.model, self.optimizer, Path(checkpoint))
        state = torch.load(Path(checkpoint, _SCHEDULER), weights_only=True)
        self.lr_scheduler.load_state_dict(state)

    def _load_best_model(self) -> None:
        """The weights of the best checkpoint."""
        best = self.state.best_model_checkpoint
        if best is None or not self.layout.engine.places_weights:
            super()._load_best_model()
            if best is not None and not self.layout.engine.reads_own_weights:
                take_renamed(self.model, Path(best))
            return
        self.layout.engine.load_weights(self.model, Path(best))
