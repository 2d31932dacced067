"""Taking up a run at a checkpoint: the recipe's values win over the saved ones, and no row is lost.

transformers restores the optimizer's groups and the schedule as they were saved, so an override of
a learning rate or a weight decay would do nothing. And it forgets an evaluation that was due when
the process ended.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerState, TrainingArguments

from trainkit.train.checkpoints import folder_name
from trainkit.train.hooks import Hook, LoopState
from trainkit.train.log.rows import missed_evaluation
from trainkit.train.results.evaluations import Evaluations

_OPTIONS = ("weight_decay", "betas", "eps", "momentum")


class TakeUp(Hook):
    """Makes the recipe's values win over those that the checkpoint brought."""

    def begin(self, loop: LoopState, checkpoint: Path | None) -> None:
        """Everything is restored by now, and no step is taken yet."""
        assert checkpoint is not None
        args, state = loop.args, loop.state
        for group, wanted in zip(loop.optimizer.param_groups, loop.group_options, strict=True):
            group.update({name: wanted[name] for name in _OPTIONS if name in wanted})
        self._set_rates(loop)
        self._find_best(loop, checkpoint)
        if state.is_world_process_zero:  # a kill may have come between a commit and the thinning
            best = state.best_model_checkpoint
            spared = {checkpoint, None if best is None else Path(best)}
            loop.checkpoints.thin_out(args.save_total_limit, spared)
        evaluations, missed = loop.hook(Evaluations), missed_evaluation(checkpoint)
        evaluations.makes_up = missed is not None or _misses_evaluation(args, state)
        if missed == "figures" and evaluations.measurements:
            evaluations.is_alone = True

    def _find_best(self, loop: LoopState, checkpoint: Path) -> None:
        """The best checkpoint is next to this one, whatever the state says: it is a file too.

        transformers keeps its whole path, which may be the run's former name or anyone's.
        """
        state = loop.state
        state.best_model_checkpoint = None
        if type(state.best_global_step) is not int or not state.best_global_step:
            return
        best = checkpoint.parent / folder_name(state.best_global_step)
        if best.is_dir() and not best.is_symlink():
            state.best_model_checkpoint = str(best)
        elif loop.args.load_best_model_at_end:
            loop.run.console.note(
                f"{best.name}, the best so far, is gone: unless a better one comes, final/ will be "
                "the model of the last step"
            )

    def _set_rates(self, loop: LoopState) -> None:
        """The schedule of the recipe goes on at this step, with its rates, warm-up and arguments.

        Only the shape of a schedule that is a function of the step can be another one.
        """
        groups, scheduler = loop.optimizer.param_groups, loop.scheduler
        before = [group["lr"] for group in groups]
        if isinstance(scheduler, LambdaLR):
            wanted = [options["initial_lr"] for options in loop.group_options]
            scheduler.base_lrs = wanted
            rates = [
                base * shape(scheduler.last_epoch)
                for base, shape in zip(wanted, scheduler.lr_lambdas, strict=True)
            ]
            for group, base in zip(groups, wanted, strict=True):
                group["initial_lr"] = base
        else:
            rates = self._scaled_rates(loop, groups)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        scheduler._last_lr = rates
        options = loop.group_options
        changed: dict[str, tuple[float, float]] = {}
        for was, now, given in zip(before, rates, options, strict=True):
            if was != now:
                is_usual = given["lr"] == loop.args.learning_rate
                changed.setdefault("" if is_usual else " in LoRA+'s B matrices", (was, now))
        for where, (was, now) in sorted(changed.items()):
            loop.run.console.note(
                f"the learning rate goes on at {now:.4g}{where}; it was {was:.4g}"
            )

    def _scaled_rates(self, loop: LoopState, groups: Sequence[Mapping[str, Any]]) -> list[float]:
        """The rates that a schedule with a state of its own has come to, over the recipe's."""
        rate = loop.args.learning_rate
        factor = rate / (loop.run.review.value_before("training.learning_rate") or rate or 1.0)
        ratio = loop.run.review.factor("lora.lora_plus_ratio")
        return [
            group["lr"] * factor * (ratio if options["lr"] != rate else 1.0)
            for group, options in zip(groups, loop.group_options, strict=True)
        ]


def _misses_evaluation(args: TrainingArguments, state: TrainerState) -> bool:
    """Whether the process ended, or was stopped, when an evaluation was due at the saved step."""
    if args.eval_strategy == "epoch":
        is_due = bool(state.epoch) and state.epoch % 1 == 0 and args.eval_delay <= state.epoch
    elif args.eval_strategy == "steps" and state.eval_steps:
        is_due = state.global_step % state.eval_steps == 0 and args.eval_delay <= state.global_step
    else:
        is_due = False
    if not is_due or not state.global_step:
        return False
    rows = [row for row in state.log_history if row.get("step") == state.global_step]
    return not any(key.startswith("eval_") for row in rows for key in row)
