"""The row of training figures, every ``logging_steps``, and the one that ends a run."""

import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.trainer_utils import speed_metrics

from trainkit.checkpoint.weights.contents import taking_up
from trainkit.train.hooks import Hook, LoopState
from trainkit.train.optimizer.watched import Numbers
from trainkit.train.results.evaluations import Evaluations

if TYPE_CHECKING:
    from trainkit.objectives.batches import BatchCounts
    from trainkit.train.background import Save


class Rows(Hook):
    """Adds up what the steps since the last row have come to.

    Attributes:
        loss_sum: 0-d, on the device.
        logged_step: the step of the last row.
    """

    def begin(self, loop: LoopState, checkpoint: Path | None) -> None:
        """Begin to count; a continued run goes on with what was counted since its last row."""
        args, state = loop.args, loop.state
        self.loss_sum = torch.zeros((), device=args.device)
        self.logged_step = self._first = state.global_step
        self._total, self._began = 0.0, time.time()
        self._flops = self._tokens = 0.0
        self._tokens_before = state.num_input_tokens_seen
        self._flops_per_token = 6 * loop.model.num_parameters(exclude_embeddings=True)
        if checkpoint is not None:
            self._load(checkpoint, loop)

    def before_step(
        self,
        loop: LoopState,
        micro: Sequence[dict[str, Any]],
        counts: Sequence["BatchCounts"],
        seconds: float,
    ) -> None:
        """Count what is in them."""
        if loop.run.numbers.leaves_out:
            loop.meter.begin_step()
        loop.meter.count_step(seconds)
        for each in counts:
            loop.meter.count_batch(each)
        tokens = sum(batch["input_ids"].numel() for batch in micro)
        self._flops += float(self._flops_per_token * tokens)
        if loop.args.include_num_input_tokens_seen == "all":
            self._tokens += tokens
        elif loop.args.include_num_input_tokens_seen == "non_padding":
            pad = loop.tokenizer.pad_token_id
            masks = (batch.get("attention_mask", batch["input_ids"] != pad) for batch in micro)
            self._tokens += sum(int(mask.sum()) for mask in masks)

    def stepped(self, loop: LoopState, losses: Sequence[torch.Tensor]) -> None:
        """Add up the losses."""
        before = self.loss_sum
        for each in losses:  # one by one: sums in another order are others
            self.loss_sum = self.loss_sum + each
        if loop.run.numbers.leaves_out:
            left_out = loop.guard.left_out > 0
            self.loss_sum = torch.where(left_out, before, self.loss_sum)
            loop.meter.leave_out(left_out)

    def due(self, loop: LoopState) -> None:
        """Log the row."""
        num_steps = loop.state.global_step - self.logged_step
        if not loop.control.should_log or num_steps <= 0:
            return
        mean = loop.ranks.reduce(self.loss_sum, "mean").item()
        self.loss_sum = torch.zeros_like(self.loss_sum)
        self._total, self.logged_step = self._total + mean, loop.state.global_step
        self._count(loop)
        norm = loop.norm.item() if isinstance(loop.norm, torch.Tensor) else loop.norm
        row = {"loss": mean / num_steps, "grad_norm": norm, "learning_rate": loop.rate}
        loop.guard.flush()
        row |= {**loop.meter.read(loop.model), **loop.engine.figures()}
        loop.hook(Numbers).leave_out_skipped(loop, row)
        if loop.args.include_num_input_tokens_seen != "no":
            seen = loop.state.num_input_tokens_seen - self._tokens_before
            row |= speed_metrics("train", self._began, num_tokens=seen)
        loop.log(row)

    def _count(self, loop: LoopState) -> None:
        """What all ranks have computed and seen since the last call."""
        mine = torch.tensor(
            (self._flops, self._tokens), dtype=torch.float64, device=loop.args.device
        )
        flops, tokens = loop.ranks.reduce(mine).tolist()
        self._flops = self._tokens = 0.0
        loop.state.total_flos += flops
        loop.state.num_input_tokens_seen += int(tokens)

    def end(self, loop: LoopState) -> None:
        """Log the run as a whole."""
        self._count(loop)
        total = self._total + self.loss_sum.item()
        num_steps = loop.state.global_step - self._first
        row = speed_metrics("train", self._began, num_steps=num_steps)
        row["total_flos"] = loop.state.total_flos
        loop.log({**row, "train_loss": total / max(num_steps, 0.001)})

    # -- what a checkpoint between two rows keeps -------------------------------------------------

    def save(self, loop: LoopState, save: "Save") -> None:
        """What was counted since the last row, and an evaluation that is missed."""
        self._count(loop)
        stop = loop.stop
        if stop.misses_evaluation or loop.state.global_step > self.logged_step:
            missed = "figures" if loop.hook(Evaluations).is_alone else "all"
            values = {
                "loss": float(self.loss_sum),  # JSON keeps every bit of a float
                "logged_step": self.logged_step,
                "meter": loop.meter.state(loop.model),
                "evaluation": missed if stop.misses_evaluation else None,
            }
            path, text = window_file(save.directory, loop.args.process_index), json.dumps(values)
            save.attempt(partial(path.write_text, text, encoding="utf-8"))

    def _load(self, checkpoint: Path, loop: LoopState) -> None:
        """Go on counting; nothing to do where the checkpoint's step was logged."""
        path = window_file(checkpoint, loop.args.process_index)
        if path.is_file():
            with taking_up(path):
                values = json.loads(path.read_text(encoding="utf-8"))
                self.loss_sum = self.loss_sum + float(values["loss"])
                self.logged_step = int(values["logged_step"])
                loop.meter.restore(values["meter"])


def window_file(directory: Path, dist_rank: int) -> Path:
    """What a rank had counted since the last row when a checkpoint was saved."""
    return directory / f"log_window_rank{dist_rank}.json"


def missed_evaluation(checkpoint: Path) -> str | None:
    """The evaluation that a stopped run missed: of ``all``, or of ``figures`` besides the loss.

    All ranks must know the same, and there may be other ranks than there were.
    """
    path = window_file(checkpoint, 0)
    if not path.is_file():
        return None
    with taking_up(path):
        missed: str | None = json.loads(path.read_text(encoding="utf-8")).get("evaluation")
    return missed
