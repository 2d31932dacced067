"""What every training engine answers, and the answers of plain DistributedDataParallel. No torch.

Another engine is a subclass that answers differently, and a row of ``strategies.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.parallel.process import ProcessRank

if TYPE_CHECKING:
    import torch
    from torch import nn


class Engine:
    """DistributedDataParallel, or one process: every rank holds the whole model.

    Attributes:
        keeps_masters: it keeps fp32 copies of half-precision weights, so the optimizer must not.
        holds_back: it does not take a step with a NaN or infinite gradient.
        places_weights: it spreads the weights before the optimizer is made, so nobody may wrap the
            model; it saves and loads them, too.
        reads_own_weights: it takes up a checkpoint's weights from files of its own.
        shards_optimizer: each rank holds a part of the optimizer's state.
        reshards: another number of ranks can take up those parts.
        runs_steps: it takes all micro-batches of a step at once, and keeps a part of the model
            on each rank: `load_part` to `clip` are asked.
        packages: whose versions decide the curve.
    """

    keeps_masters = False
    holds_back = False
    places_weights = False
    reads_own_weights = False
    shards_optimizer = False
    reshards = False
    runs_steps = False
    packages: tuple[str, ...] = ()

    def refuse_contradictions(self, training: Mapping[str, Any], *, world_size: int) -> None:
        """Refuse settings of the engine's own file that the recipe gives otherwise.

        Args:
            training: the fields of the ``training`` section that decide the size of a step.
            world_size: processes of the run.

        Raises:
            RecipeError: naming both.
        """

    def prepare(self, process: ProcessRank, *, on_cpu: bool) -> None:
        """Before TrainingArguments exist."""

    def training_arguments(self, *, num_micro_batches: int) -> dict[str, Any]:
        """What TrainingArguments are given besides the recipe's.

        Args:
            num_micro_batches: of an optimizer step, on each rank.
        """
        del num_micro_batches
        return {}

    def start(self, *, on_cpu: bool) -> None:
        """Once the process group exists, before the model is loaded."""

    def refuse_model(self, config: Any) -> None:
        """Refuse a model that cannot be spread so, from its configuration alone.

        Raises:
            ModelError: with the reason.
        """

    def load_part(
        self, model_class: type, config: Any, load: Callable[[type], tuple[Any, Any]]
    ) -> tuple[Any, Any]:
        """Load what this rank holds of a model.

        Args:
            model_class: of the model.
            config: of the model.
            load: ``from_pretrained`` of a class, with its report.
        """
        del config
        return load(model_class)

    def keep_part(self, model: nn.Module) -> None:
        """Cut away what other ranks hold, in place; adapters and kernels are in the model."""

    def reads_parts(self, device: torch.device) -> Callable[[nn.Module], bool] | None:
        """Says of a model on the meta device whether each rank reads its part of it in `place`.

        None of an engine whose models are loaded before they are spread.
        """
        del device
        return None

    def loading_device(self, device: torch.device) -> torch.device | None:
        """Where weights go as they are loaded; None leaves it to the engine."""
        return device

    def loading_whole(self) -> AbstractContextManager[None]:
        """Within, a model is loaded whole, also where weights are sharded as they are loaded."""
        return nullcontext()

    def gathering(self, model: nn.Module) -> AbstractContextManager[None]:
        """Within, a model that no engine has wrapped yet can run, its weights sharded or not."""
        del model
        return nullcontext()

    def place(self, model: nn.Module, device: torch.device) -> None:
        """Spread a whole model over the ranks, in place; before the optimizer is made."""

    def place_stages(
        self,
        model: nn.Module,
        device: torch.device,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """As `place`, of an engine that runs steps; ``autocast`` is what forward passes need."""
        raise NotImplementedError

    def step(
        self,
        model: nn.Module,
        batches: Sequence[Mapping[str, Any]],
        loss: Callable[[nn.Module, dict[str, Any]], Any],
        gather: Callable[[], object] = lambda: None,
    ) -> torch.Tensor:
        """All micro-batches of a step forth and back.

        Args:
            model: cut; its mode counts.
            batches: on the device.
            loss: of a model that ends with a head and a batch: its part of the step's loss.
            gather: takes what gradients there are into fp32, where somebody keeps them so.

        Returns:
            The loss of each micro-batch, (M,) float32, on every rank.
        """
        raise NotImplementedError

    def forward(
        self,
        model: nn.Module,
        batch: Mapping[str, Any],
        last: Callable[[nn.Module, dict[str, Any]], Any],
    ) -> Any:
        """A batch forth only; what ``last`` returns where the head is, None on other ranks."""
        raise NotImplementedError

    def runnable(self, model: nn.Module) -> nn.Module:
        """The model as something that gives logits when all ranks call it together."""
        return model

    def finish_gradients(self, holders: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """After `step`: the sums over ranks. Each trained parameter with what has its gradient."""
        raise NotImplementedError

    def clip(self, holders: Mapping[nn.Parameter, nn.Parameter], max_norm: float) -> torch.Tensor:
        """Clip all ranks' gradients together; returns their norm before, 0-d."""
        raise NotImplementedError

    def take_seconds(self) -> tuple[float, float]:
        """Of this rank since the last call: computing, and steps in all."""
        raise NotImplementedError

    def gather(self, mine: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Small weights of all ranks by name, on the first one; every rank calls it."""
        raise NotImplementedError

    def write_weights(self, model: nn.Module, folder: Path) -> None:
        """Write this rank's part of a model as ``from_pretrained`` reads it; every rank calls."""
        raise NotImplementedError

    def saved_dtype(self, name: str, parameter: nn.Parameter) -> torch.dtype:
        """What a parameter is saved in."""
        del name
        return parameter.dtype

    def whole_weights(
        self, model: nn.Module, *, keep: bool, adapters_only: bool
    ) -> dict[str, torch.Tensor] | None:
        """All weights by name, where this rank is to ``keep`` them; None: as ``state_dict`` has it.

        Every rank calls it. ``adapters_only`` leaves out a frozen base.
        """

    @property
    def shards_weights(self) -> bool:
        """Whether no rank holds a full weight except while it is used."""
        return False

    def deferring_writes(
        self, take: Callable[[Path, Callable[[], None]], None]
    ) -> AbstractContextManager[None]:
        """Within, files that the engine writes are given to ``take``, to be written later."""
        del take
        return nullcontext()

    def save_shards(self, engine: Any, folder: Path, *, only_trained: bool) -> None:
        """Write each rank's part, of an engine that wraps the model and saves by itself.

        Args:
            engine: the wrapped model.
            folder: the checkpoint.
            only_trained: leave out frozen weights.
        """
        raise NotImplementedError

    def save_state(self, model: nn.Module, optimizer: Any, folder: Path) -> None:
        """Write what continues the run exactly, of an engine that places weights."""
        raise NotImplementedError

    def load_state(self, model: nn.Module, optimizer: Any, folder: Path) -> None:
        """Take up what `save_state` wrote."""
        raise NotImplementedError

    def load_weights(self, model: nn.Module, folder: Path) -> None:
        """Take up the weights of what `save_state` wrote."""
        raise NotImplementedError

    def whole_model(self, model: nn.Module, reload: Callable[[], nn.Module]) -> nn.Module:
        """A model that each rank can run by itself, after training.

        Args:
            model: as it was trained, unwrapped.
            reload: loads the saved final model, for engines under which no rank holds all of it.
        """
        del reload
        return model
