"""Checkpoints: what is saved is copied, and written while training goes on.

A step waits only for the copy to host memory: of the weights that are saved, and of this rank's
part of the optimizer. So a host needs, besides, as much memory as its ranks' parts of a checkpoint.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainkit.parallel.snapshot import pin_ahead, snapshot
from trainkit.train.background import Save
from trainkit.train.checkpoints import (
    BASE,
    SCHEDULER,
    TRAINER_STATE,
    folder_name,
    read_weights,
    remember_origin,
)
from trainkit.train.hooks import Hook, LoopState
from trainkit.train.optimizer.watched import Numbers
from trainkit.train.results.hub import Hub
from trainkit.train.resume.random_state import random_file, random_state


class Saves(Hook):
    """``checkpoint-N``, when it is due; the best of them at the end, where that is wanted."""

    _has_pinned = False
    hub: Hub | None = None
    """Gets each of them, where that is wanted."""

    def due(self, loop: LoopState) -> None:
        """Save, if it is."""
        if not self._has_pinned and loop.args.save_strategy != "no":
            # The optimizer has its states now; pinned for the first save alone, it takes seconds.
            pin_ahead(loop.engine.copied_by_a_save())
        self._has_pinned = True
        if not loop.control.should_save:
            return
        loop.hook(Numbers).check(loop, folder_name(loop.state.global_step))
        watch = loop.run.watch
        with nullcontext() if watch is None else watch.slow("saving"):
            self.save_checkpoint(loop)
        loop.event("on_save")

    def save_checkpoint(self, loop: LoopState) -> None:
        """Copy what makes it, and let it appear whole when it is written."""
        args, state, writer = loop.args, loop.state, loop.checkpoints
        saving = writer.saving(
            state.global_step,
            loop.ranks,
            state,
            limit=args.save_total_limit,
            keep=None if self.hub is None else self.hub.uploading,
        )
        with saving as save:
            _write_weights(loop, save)
            if not args.save_only_model:
                loop.engine.save_state(save)
                save_small(save, random_file(save.directory, args), random_state(args))
                if args.should_save:
                    schedule = snapshot(loop.scheduler.state_dict())
                    save_small(save, save.directory / SCHEDULER, schedule)
            if loop.stream is not None:
                save.attempt(partial(loop.stream.save, save.directory))
            for hook in loop.hooks:
                hook.save(loop, save)
            best = writer.root / folder_name(state.best_global_step or 0)
            if state.best_global_step in (0, None):
                pass
            elif best.is_dir() or state.best_global_step == state.global_step:
                state.best_model_checkpoint = str(best)
            if args.should_save:
                for each in loop.exported():
                    state.stateful_callbacks[type(each).__name__] = each.state()
                path = save.directory / TRAINER_STATE
                save.attempt(partial(state.save_to_json, str(path)))
        if args.push_to_hub:
            writer.wait()
            if self.hub is not None:
                target = writer.root / folder_name(state.global_step)
                self.hub.push_checkpoint(target, state.global_step)

    def end(self, loop: LoopState) -> None:
        """A run that was asked to stop will go on: from its last checkpoint, not from the best."""
        loop.checkpoints.wait()
        args, best = loop.args, loop.state.best_model_checkpoint
        if loop.stop.has_saved or best is None:
            return
        folder = Path(best)
        if args.load_best_model_at_end and folder.is_dir():
            loop.engine.load_best(folder, partial(read_weights, loop.model, folder))
        if args.should_save and args.save_total_limit == 1:
            loop.checkpoints.thin_out(1, {folder})


def save_model(loop: LoopState, folder: Path) -> None:
    """Write the model alone, at once; all ranks call it."""
    save = Save(folder, at_once=True)
    _write_weights(loop, save)
    save.finish(records=False)


def _write_weights(loop: LoopState, save: Save) -> None:
    def write(weights: Mapping[str, Any]) -> None:
        loop.model.save_pretrained(save.directory, state_dict=weights)
        loop.tokenizer.save_pretrained(save.directory)
        base = Path(loop.model.config.name_or_path)
        remember_origin(save.directory, base, loop.checkpoints.fingerprint.get(BASE))

    loop.engine.save_weights(save, write)


def save_small(save: Save, path: Path, state: Any) -> None:
    """Into a file of its own, later: few numbers, which nothing changes any more."""
    save.defer(path, partial(torch.save, state, path))
