"""Taking up a run at a checkpoint: the recipe's values win over the saved ones, and no row is lost.

transformers restores the optimizer's groups and the schedule as they were saved, so an override of
a learning rate or a weight decay would do nothing. And it forgets an evaluation that was due when
the process ended.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trainkit.train.checkpoints import folder_name
from trainkit.train.log.rows import missed_evaluation
from trainkit.train.resume.changes import Review

_OPTIONS = ("weight_decay", "betas", "eps", "momentum")


def options_of(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What a new optimizer's groups are to have, before saved ones take their place."""
    kept = ("lr", "initial_lr", *_OPTIONS)
    return [{name: group[name] for name in kept if name in group} for group in groups]


class TakeUp(TrainerCallback):
    """Makes the recipe's values win over those that the checkpoint brought.

    Args:
        loop: that continues.
        review: what was changed.
        checkpoint: where it continues from.
        note: tells the user.
    """

    def __init__(
        self,
        loop: Any,
        review: Review,
        checkpoint: Path,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._loop = loop
        self._review = review
        self._checkpoint = checkpoint
        self._note = note

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Everything is restored by now, and no step is taken yet."""
        self._set_groups(kwargs["optimizer"])
        self._set_rates(kwargs["optimizer"], kwargs["lr_scheduler"])
        self._find_best(args, state)
        if state.is_world_process_zero:  # a kill may have come between a commit and the thinning
            best = state.best_model_checkpoint
            spared = {self._checkpoint, None if best is None else Path(best)}
            self._loop.checkpoints.thin_out(args.save_total_limit, spared)
        evaluations, missed = self._loop.evaluations, missed_evaluation(self._checkpoint)
        evaluations.makes_up = missed is not None or _misses_evaluation(args, state)
        if missed == "figures" and evaluations.measurements is not None:
            evaluations.measurements.is_alone = True

    def _find_best(self, args: TrainingArguments, state: TrainerState) -> None:
        """The best checkpoint is next to this one, whatever the state says: it is a file too.

        transformers keeps its whole path, which may be the run's former name or anyone's.
        """
        state.best_model_checkpoint = None
        if type(state.best_global_step) is not int or not state.best_global_step:
            return
        best = self._checkpoint.parent / folder_name(state.best_global_step)
        if best.is_dir() and not best.is_symlink():
            state.best_model_checkpoint = str(best)
        elif args.load_best_model_at_end:
            self._note(
                f"{best.name}, the best so far, is gone: unless a better one comes, final/ will be "
                "the model of the last step"
            )

    def _set_groups(self, optimizer: Any) -> None:
        for group, wanted in zip(optimizer.param_groups, self._loop.group_options, strict=True):
            group.update({name: wanted[name] for name in _OPTIONS if name in wanted})

    def _set_rates(self, optimizer: Any, scheduler: Any) -> None:
        """The schedule of the recipe goes on at this step, with its rates, warm-up and arguments.

        Only the shape of a schedule that is a function of the step can be another one.
        """
        groups = optimizer.param_groups
        before = [group["lr"] for group in groups]
        if isinstance(scheduler, LambdaLR):
            wanted = [options["initial_lr"] for options in self._loop.group_options]
            scheduler.base_lrs = wanted
            rates = [
                base * shape(scheduler.last_epoch)
                for base, shape in zip(wanted, scheduler.lr_lambdas, strict=True)
            ]
            for group, base in zip(groups, wanted, strict=True):
                group["initial_lr"] = base
        else:
            rates = self._scaled_rates(groups)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        scheduler._last_lr = rates
        options = self._loop.group_options
        changed: dict[str, tuple[float, float]] = {}
        for was, now, given in zip(before, rates, options, strict=True):
            if was != now:
                is_usual = given["lr"] == self._loop.args.learning_rate
                changed.setdefault("" if is_usual else " in LoRA+'s B matrices", (was, now))
        for where, (was, now) in sorted(changed.items()):
            self._note(f"the learning rate goes on at {now:.4g}{where}; it was {was:.4g}")

    def _scaled_rates(self, groups: Sequence[Mapping[str, Any]]) -> list[float]:
        """The rates that a schedule with a state of its own has come to, over the recipe's."""
        rate = self._loop.args.learning_rate
        factor = rate / (self._review.value_before("training.learning_rate") or rate or 1.0)
        ratio = self._review.factor("lora.lora_plus_ratio")
        return [
            group["lr"] * factor * (ratio if options["lr"] != rate else 1.0)
            for group, options in zip(groups, self._loop.group_options, strict=True)
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
