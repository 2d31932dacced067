"""What happens around the steps of a run, and what it sees of the loop."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from transformers import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
    enable_full_determinism,
    set_seed,
)
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, ExportableState
from transformers.utils import logging as transformers_logging

from trainkit.errors import RecipeError
from trainkit.objectives.objective import BatchCounts, LossSetup, accepts_num_items, take_counts
from trainkit.parallel.engine import Ranks
from trainkit.train.data import Batches, EpochPlan, stream_state
from trainkit.train.faults.numbers import NumberGuard
from trainkit.train.run import Run

if TYPE_CHECKING:
    from trainkit.train.checkpoints import Save

KEPT_ROWS = 1000
"""Logged rows that the run's state keeps, so that a save does not grow with the run."""


class Hook:
    """What happens around the steps; all are asked in the order of the loop's list, on every rank.

    What begins with ``on_`` is told behind transformers' callbacks, at the same moment.
    """

    def on_init_end(self, loop: LoopState) -> None:
        """The loop is there, and the model as it was built."""

    def begin(self, loop: LoopState, checkpoint: Path | None) -> None:
        """All is made, and what a checkpoint holds is loaded."""

    def before_step(
        self,
        loop: LoopState,
        micro: Sequence[dict[str, Any]],
        counts: Sequence[BatchCounts],
        seconds: float,
    ) -> None:
        """These micro-batches are a step; fetching them took so long."""

    def on_step_begin(self, loop: LoopState) -> None:
        """The first micro-batch is about to be computed."""

    def on_substep_end(self, loop: LoopState) -> None:
        """Behind a micro-batch that is not the last."""

    def on_pre_optimizer_step(self, loop: LoopState) -> None:
        """The gradients are complete."""

    def stepped(self, loop: LoopState, losses: Sequence[torch.Tensor]) -> None:
        """The update is made, and counted."""

    def on_step_end(self, loop: LoopState) -> None:
        """``loop.control`` says what is due; a hook may change it."""

    def on_epoch_end(self, loop: LoopState) -> None:
        """Likewise."""

    def due(self, loop: LoopState) -> None:
        """Behind each step, and each epoch: do what ``loop.control`` says is due."""

    def on_log(self, loop: LoopState, row: dict[str, Any]) -> None:
        """A row of figures is logged."""

    def on_evaluate(self, loop: LoopState, row: dict[str, Any]) -> None:
        """An evaluation has come to these figures."""

    def save(self, loop: LoopState, save: Save) -> None:
        """Its own part of a checkpoint: small files."""

    def on_save(self, loop: LoopState) -> None:
        """A checkpoint is on its way."""

    def end(self, loop: LoopState) -> None:
        """Behind the last step."""

    def failed(self, loop: LoopState, error: Exception) -> None:
        """Training ends with an error."""

    def on_train_end(self, loop: LoopState) -> None:
        """Nothing follows."""


Kind = TypeVar("Kind", bound=Hook)


def own_callbacks(names: Sequence[str]) -> list[type[TrainerCallback]]:
    """The classes that a recipe's ``callbacks`` name, as ``module.Class``.

    Raises:
        RecipeError: nothing of that name can be imported, or it is no TrainerCallback.
    """
    found = []
    for place, name in enumerate(names):
        where, (module, _, last) = f"callbacks[{place}]", name.rpartition(".")
        try:
            kind = getattr(importlib.import_module(module), last)
        except (ImportError, AttributeError) as error:
            raise RecipeError(
                f"{name} cannot be imported: {error}",
                where=where,
                fix="name a class as module.Class; `PYTHONPATH=. trainkit sft ...` finds the "
                "modules of this folder",
            ) from error
        if not (isinstance(kind, type) and issubclass(kind, TrainerCallback)):
            raise RecipeError(
                f"{name} is no transformers.TrainerCallback", where=where, fix="derive it from that"
            )
        found.append(kind)
    return found


class LoopState:
    """What a loop trains, how far it is, and who is told.

    Attributes:
        group_options: what the recipe gives the optimizer's groups, whatever a checkpoint brought.
        num_loss_ranks: ranks with a part of what a step's loss is divided by.
        norm: of the last step's gradients, before clipping.
    """

    loader: Batches
    epochs: EpochPlan
    follows_metric: bool
    group_options: list[dict[str, Any]]
    norm: torch.Tensor | float | None
    rate: float

    def __init__(self, run: Run, hooks: Sequence[Hook]) -> None:
        args, model, layout = run.args, run.built.model, run.layout
        (enable_full_determinism if args.full_determinism else set_seed)(args.seed)
        transformers_logging.set_verbosity(args.get_process_log_level())
        self.run, self.hooks = run, list(hooks)
        self._of_moment: dict[str, list[Hook]] = {}
        self.model, self.args, self.layout, self.engine = model, args, layout, layout.engine
        self.tokenizer, self.checkpoints, self.stop = run.tokenizer, run.checkpoints, run.stop
        self.train_data, self.eval_data = run.data.train, run.data.eval
        self.ranks = Ranks(args)
        of_all = args.average_tokens_across_devices
        self.num_loss_ranks = layout.loss_ranks if of_all else layout.options.sequence
        self.engine.receive(model, args)
        model.config.use_cache = args.use_cache
        self.wrapped: nn.Module = model
        self.optimizer: Any = None
        self.scheduler: Any = None
        self.latest_batch: dict[str, Any] | None = None
        self.takes_num_items = accepts_num_items(model)
        self.loss = run.data.objective.loss(
            LossSetup(
                model,
                takes_num_items=self.takes_num_items,
                label_smoothing=args.label_smoothing_factor,
                chunk_tokens=run.recipe.model.loss_chunk_tokens,
                keeps_gradient=not run.recipe.optim_in_backward,
                train_sources=self.train_data.sources,
                eval_sources=self.eval_data.sources if self.eval_data else (),
                preference=run.recipe.preference,
                distill=run.recipe.distill,
                eaft=run.recipe.eaft,
                teacher=run.teacher,
                router_aux_loss=run.recipe.model.router_aux_loss,
                router_z_loss=run.recipe.model.router_z_loss,
            )
        )
        self.stream = stream_state(self.train_data, args, layout)
        self.guard = NumberGuard(
            args, self.ranks, self.train_data.sample_name, run.stop, run.numbers, run.console.warn
        )
        trackers = get_reporting_integration_callbacks(args.report_to)
        own = own_callbacks(run.recipe.callbacks)
        self.callbacks = CallbackHandler(
            [DefaultFlowCallback, *trackers, *own], model, run.tokenizer, None, None
        )
        for callback in [*trackers, *own] if run.options.dry_run else ():
            self.callbacks.remove_callback(callback)  # made, to see that it can be; told nothing
        self.control = TrainerControl()
        self.state = self.new_state()
        self.event("on_init_end")

    @property
    def is_over(self) -> bool:
        """Whether no step follows in this epoch."""
        control, state = self.control, self.state
        is_stopped = control.should_epoch_stop or control.should_training_stop
        return is_stopped or state.global_step >= state.max_steps

    def event(self, name: str, *given: Any) -> None:
        """Tell transformers' callbacks, then our hooks."""
        self.control = getattr(self.callbacks, name)(self.args, self.state, self.control, *given)
        self.tell(name, *given)

    def tell(self, name: str, *given: Any) -> None:
        """Ask our hooks, in order: those that do something then, which are found once."""
        if name not in self._of_moment:
            nothing = getattr(Hook, name, None)
            self._of_moment[name] = [
                hook for hook in self.hooks if getattr(type(hook), name, None) is not nothing
            ]
        for hook in self._of_moment[name]:
            getattr(hook, name)(self, *given)

    def hook(self, kind: type[Kind]) -> Kind:
        """The one of this kind."""
        return next(hook for hook in self.hooks if isinstance(hook, kind))

    def log(self, row: dict[str, Any]) -> None:
        """Keep a row of figures, and tell of it; metrics.jsonl has all rows, the state the last."""
        state = self.state
        if state.epoch is not None:
            row["epoch"] = state.epoch
        if self.args.include_num_input_tokens_seen != "no":
            row["num_input_tokens_seen"] = state.num_input_tokens_seen
        rows = state.log_history
        rows.append({**row, "step": state.global_step})
        self.event("on_log", row)
        if len(rows) > 2 * KEPT_ROWS:
            del rows[1:-KEPT_ROWS]

    def loss_of(self, batch: dict[str, Any]) -> torch.Tensor:
        """The loss of a batch by itself, counts included; nothing is logged or watched."""
        batch = {name: value for name, value in batch.items() if name != "source_ids"}
        counts = take_counts(batch, self.loss.num_items)
        with self.sharing():
            return self.loss.evaluate(self.model, self.prepare(batch), counts.num_items).loss_sum

    def prepare(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Copy a batch to the device without waiting for the device to finish its work."""
        if self.run.watch is not None:
            self.run.watch.mark("training" if self.model.training else "evaluating")
        self.latest_batch, rows, device = batch, self.layout.rows, self.args.device
        inputs = batch if rows is None else rows.part(batch)
        return {
            name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
            for name, value in inputs.items()
        }

    def total(self, mine: torch.Tensor, *, counted: bool) -> torch.Tensor:
        """What the ranks that share a step's denominator have of a sum, those that are counted."""
        if not self.args.average_tokens_across_devices:
            return mine
        return self.ranks.reduce(mine if counted else torch.zeros_like(mine))

    def sharing(self) -> AbstractContextManager[Any]:
        """Within, attention knows where ranks have a part of each row."""
        return nullcontext() if self.layout.rows is None else self.layout.rows.at_work()

    def exported(self) -> list[ExportableState]:
        """Callbacks whose state is saved."""
        every = [*self.callbacks.callbacks, self.control]
        return [each for each in every if isinstance(each, ExportableState)]

    def new_state(self) -> TrainerState:
        state = TrainerState(
            stateful_callbacks=self.exported(),
            is_local_process_zero=self.args.local_process_index == 0,
            is_world_process_zero=self.ranks.is_main_process,
        )
        state.train_batch_size = self.args.train_batch_size
        return state
