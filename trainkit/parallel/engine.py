"""What every strategy of spreading a run over processes answers. No torch.

A strategy owns its step: it places the model, takes it forward and backward, updates it, saves and
loads it. Whoever holds one never asks which. Plain DistributedDataParallel is
`trainkit.parallel.replicated`; each other one is a subclass of that, or of `Engine`, and a row of
``strategies.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trainkit.parallel.process import ProcessRank

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainkit.parallel.ranks import Ranks

Batch = dict[str, Any]
"""What the model and the loss take of a micro-batch, on the device."""

LoadPart = Callable[[type, Any, Callable[[type], tuple[Any, Any]]], tuple[Any, Any]]


class Saving(Protocol):
    """Where a strategy's files of a checkpoint, or of a model, go: at once or in the background."""

    directory: Path

    def copied(self, state: Any) -> Any:
        """A state that training cannot change while it is written."""

    def defer(self, path: Path | None, job: Callable[[], None]) -> None:
        """Have ``job`` write, perhaps later; ``path`` is its only file, or None."""

    def attempt(self, job: Callable[[], object]) -> None:
        """Write a small file now."""


@dataclass(frozen=True)
class Training:
    """What a strategy trains.

    Attributes:
        model: placed already.
        optimizer: of its parameters.
        args: transformers' TrainingArguments.
        ranks: the processes.
        num_steps: of the run.
        averages: the optimizer averages gradients over ranks by itself.
    """

    model: Any
    optimizer: Any
    args: Any
    ranks: Ranks
    num_steps: int
    averages: bool = False


class Engine:
    """One strategy at work in this process.

    Attributes:
        keeps_masters: it keeps fp32 copies of half-precision weights, so the optimizer must not.
        holds_whole_model: each rank can run the model by itself.
        shards_optimizer: each rank holds a part of the optimizer's state.
        reshards: another number of ranks can take up those parts.
        packages: whose versions decide the curve.
        load_part: loads what this rank holds of a model: (class, configuration, ``from_pretrained``
            of a class, with its report); None where each rank loads all of it.
    """

    keeps_masters = False
    holds_whole_model = True
    shards_optimizer = False
    reshards = False
    packages: tuple[str, ...] = ()
    load_part: LoadPart | None = None

    # -- before there is a model ------------------------------------------------------------------

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

    # -- the model, before it trains --------------------------------------------------------------

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

    def receive(self, model: nn.Module, args: Any) -> None:
        """Take a model that is loaded, adapters and kernels in it, to where it trains.

        Raises:
            RecipeError: the arguments ask for what cannot be done so.
        """

    def place(self, model: nn.Module, device: torch.device) -> None:
        """Spread the model over the ranks, in place; before the optimizer is made."""

    # -- steps ------------------------------------------------------------------------------------

    def set_up(self, training: Training) -> nn.Module:
        """All is made; returns the model as it is called in training."""
        raise NotImplementedError

    @property
    def optimizer(self) -> Any:
        """Whose rates the schedule sets, and whose state counts; behind `set_up`."""
        raise NotImplementedError

    def forward_backward(
        self,
        batches: Iterable[Batch],
        count: int,
        loss: Callable[[Any, Batch], torch.Tensor],
        watch: Callable[[torch.Tensor], torch.Tensor | None],
    ) -> list[torch.Tensor]:
        """All micro-batches of a step.

        Args:
            batches: on the device, each once it is asked for.
            count: how many there are.
            loss: of a model and a batch: its part of the step's loss.
            watch: is told each of them, and says what its gradients are to be multiplied with.

        Returns:
            The losses, 0-d each, on every rank.
        """
        raise NotImplementedError

    def update(
        self,
        max_norm: float,
        judge: Callable[[torch.Tensor | float | None, Any], None],
        before: Callable[[], None],
    ) -> tuple[torch.Tensor | float | None, bool]:
        """Clip, hear the verdict on the numbers, step.

        Args:
            max_norm: infinite where nothing is clipped.
            judge: is told the norm, and whose step is to be held back if it is bad: None where that
                is done here.
            before: is called when the step is about to be taken.

        Returns:
            The norm before clipping, and whether the schedule goes on.
        """
        raise NotImplementedError

    def clear(self) -> None:
        """Let go of the step's gradients."""

    def evaluate(self, batch: Batch, measure: Callable[[Any, Batch], Any]) -> Any:
        """What ``measure`` says of a batch; None on a rank that has no part in the answer."""
        raise NotImplementedError

    def figures(self) -> Mapping[str, float]:
        """For the log, since the last call; every rank calls it."""
        return {}

    def runnable(self, model: nn.Module) -> nn.Module:
        """The model as something that gives logits when all ranks call it together."""
        return model

    # -- files ------------------------------------------------------------------------------------

    def save_weights(self, save: Saving, write: Callable[[Mapping[str, Any]], None]) -> None:
        """Write the model as ``from_pretrained`` reads it; every rank calls it.

        Args:
            save: where.
            write: writes all but the weights, and those that it is given; one rank calls it.
        """
        raise NotImplementedError

    def save_state(self, save: Saving) -> None:
        """Write what continues the run exactly, besides the weights; every rank calls it."""
        raise NotImplementedError

    def copied_by_a_save(self) -> list[torch.Tensor]:
        """The tensors that this rank copies for a checkpoint, as often as it copies them."""
        return []

    def load_weights(self, model: nn.Module, read: Callable[[], None]) -> None:
        """Before `place`: take up a checkpoint's weights, which ``read`` reads from whole files."""
        read()

    def load_state(self, folder: Path) -> None:
        """Behind `set_up`: what `save_state` wrote."""
        raise NotImplementedError

    def load_best(self, folder: Path, read: Callable[[], None]) -> None:
        """The weights of another checkpoint of the run; ``read`` reads them from whole files."""
        raise NotImplementedError

    def saved_dtype(self, name: str, parameter: nn.Parameter) -> torch.dtype:
        """What a parameter is saved in."""
        del name
        return parameter.dtype

    def saved_bytes(self, name: str, parameter: nn.Parameter) -> int:
        """Of each number of a parameter in a checkpoint, the optimizer's state left out."""
        return self.saved_dtype(name, parameter).itemsize

    def whole_model(self, model: nn.Module, reload: Callable[[], nn.Module]) -> nn.Module:
        """A model that each rank can run by itself, after training.

        Args:
            model: as it was trained, unwrapped.
            reload: loads the saved final model, for engines under which no rank holds all of it.
        """
        del reload
        return model
