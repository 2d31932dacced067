"""Taking up a run at a checkpoint: the recipe's values win over the saved ones, and no row is lost.

transformers restores the optimizer's groups, the schedule and the intervals as they were saved, so
an override of a learning rate, a weight decay or ``save_steps`` would do nothing. And it forgets
what was counted since the last logged row, and an evaluation that was due when the process ended.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, Protocol

from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from trainkit.train.checkpoints import folder_name
from trainkit.train.resume.changes import Review

_OPTIONS = ("weight_decay", "betas", "eps", "momentum")


def options_of(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What a new optimizer's groups are to have, before saved ones take their place."""
    kept = ("lr", "initial_lr", *_OPTIONS)
    return [{name: group[name] for name in kept if name in group} for group in groups]


class Resumable(Protocol):
    """What is read of the Trainer here, so that this file need not know it.

    Attributes:
        args: its TrainingArguments.
        model: what is trained.
        meter: counts tokens between logged rows.
        group_options: per parameter group, what the recipe says.
        checkpoints: writes and thins out the run's checkpoints.
        measurements: of figures besides the loss, or None.
    """

    args: Any
    model: Any
    meter: Any
    group_options: list[dict[str, Any]]
    checkpoints: Any
    measurements: Any
    _stop: Any
    _tr_loss: Any
    _globalstep_last_logged: Any

    def _determine_best_metric(self, metrics: Any, trial: Any) -> bool: ...


class TakeUp(TrainerCallback):
    """Makes the recipe's values win over those that the checkpoint brought.

    Args:
        trainer: the Trainer that continues.
        review: what was changed.
        checkpoint: where it continues from.
        note: tells the user.
    """

    def __init__(
        self,
        trainer: Resumable,
        review: Review,
        checkpoint: Path,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._trainer = trainer
        self._review = review
        self._checkpoint = checkpoint
        self._note = note
        self._makes_up = False

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Everything is restored by now, and no step is taken yet."""
        state.compute_steps(args, state.max_steps)
        self._set_groups(kwargs["optimizer"])
        self._set_rates(kwargs["optimizer"], kwargs["lr_scheduler"])
        load_window(self._checkpoint, self._trainer)
        self._find_best(args, state)
        if state.is_world_process_zero:  # a kill may have come between a commit and the thinning
            best = state.best_model_checkpoint
            spared = {self._checkpoint, None if best is None else Path(best)}
            self._trainer.checkpoints.thin_out(args.save_total_limit, spared)
        missed = missed_evaluation(self._checkpoint)
        self._makes_up = missed is not None or _misses_evaluation(args, state)
        if missed == "figures":
            self._trainer.measurements.is_alone = True
        args.eval_on_start = self._makes_up  # else not: the run itself has begun long ago

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """One made up for decides what any other does; transformers leaves it out at a start.

        The best model may be this checkpoint, and a schedule may follow the figure.
        """
        if not self._makes_up:
            return
        self._makes_up = False
        if self._trainer._determine_best_metric(kwargs["metrics"], None):
            state.best_model_checkpoint = str(self._checkpoint)
        scheduler = kwargs["lr_scheduler"]
        if "metrics" in signature(scheduler.step).parameters:  # reduce_lr_on_plateau, greedy
            name = str(args.metric_for_best_model).removeprefix("eval_")
            figure = kwargs["metrics"].get(f"eval_{name}")
            if figure is not None:
                scheduler.step(figure)

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
        for group, wanted in zip(optimizer.param_groups, self._trainer.group_options, strict=True):
            group.update({name: wanted[name] for name in _OPTIONS if name in wanted})

    def _set_rates(self, optimizer: Any, scheduler: Any) -> None:
        """The schedule of the recipe goes on at this step, with its rates, warm-up and arguments.

        Only the shape of a schedule that is a function of the step can be another one.
        """
        groups = optimizer.param_groups
        before = [group["lr"] for group in groups]
        scheduler = getattr(scheduler, "scheduler", scheduler)  # out of accelerate's wrapper
        if isinstance(scheduler, LambdaLR):
            wanted = [options["initial_lr"] for options in self._trainer.group_options]
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
        options = self._trainer.group_options
        changed: dict[str, tuple[float, float]] = {}
        for was, now, given in zip(before, rates, options, strict=True):
            if was != now:
                is_usual = given["lr"] == self._trainer.args.learning_rate
                changed.setdefault("" if is_usual else " in LoRA+'s B matrices", (was, now))
        for where, (was, now) in sorted(changed.items()):
            self._note(f"the learning rate goes on at {now:.4g}{where}; it was {was:.4g}")

    def _scaled_rates(self, groups: Sequence[Mapping[str, Any]]) -> list[float]:
        """The rates that a schedule with a state of its own has come to, over the recipe's."""
        rate = self._trainer.args.learning_rate
        factor = rate / (self._review.value_before("training.learning_rate") or rate or 1.0)
        ratio = self._review.factor("lora.lora_plus_ratio")
        return [
            group["lr"] * factor * (ratio if options["lr"] != rate else 1.0)
            for group, options in zip(groups, self._trainer.group_options, strict=True)
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


def save_window(directory: Path, trainer: Resumable) -> None:
    """Keep what this rank has counted since the last logged row, so that the next has all of it."""
    values = {
        "loss": float(trainer._tr_loss),  # JSON keeps every bit of a float
        "logged_step": trainer._globalstep_last_logged,
        "meter": trainer.meter.state(trainer.model),
        "evaluation": _missed(trainer),
    }
    _window_file(directory, trainer.args.process_index).write_text(
        json.dumps(values), encoding="utf-8"
    )


def load_window(checkpoint: Path, trainer: Resumable) -> None:
    """Go on counting where a checkpoint left it; nothing to do where its step was logged."""
    path = _window_file(checkpoint, trainer.args.process_index)
    if path.is_file():
        values = json.loads(path.read_text(encoding="utf-8"))
        trainer._tr_loss += values["loss"]
        trainer._globalstep_last_logged = values["logged_step"]
        trainer.meter.restore(values["meter"])


def missed_evaluation(checkpoint: Path) -> str | None:
    """The evaluation that a stopped run missed: of ``all``, or of ``figures`` besides the loss.

    All ranks must know the same, and there may be other ranks than there were.
    """
    path = _window_file(checkpoint, 0)
    return (
        json.loads(path.read_text(encoding="utf-8")).get("evaluation") if path.is_file() else None
    )


def _missed(trainer: Resumable) -> str | None:
    if not trainer._stop.misses_evaluation:
        return None
    rows = trainer.measurements
    return "figures" if rows is not None and rows.is_alone else "all"


def _window_file(directory: Path, rank: int) -> Path:
    return directory / f"log_window_rank{rank}.json"
