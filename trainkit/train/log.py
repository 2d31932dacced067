"""What the log says of the steps since the last row: tokens, speed, figures, dropped rows."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.trainer_utils import speed_metrics

from trainkit.checkpoint.weights.contents import taking_up
from trainkit.models.attention import attention_heads
from trainkit.models.linears import num_weights
from trainkit.models.loss import LossHead
from trainkit.models.loss import take_counts as take_correct
from trainkit.objectives.objective import BatchCounts
from trainkit.parallel.engine import Fetched, on_device
from trainkit.train.checkpoints import Save
from trainkit.train.evaluations import Evaluations
from trainkit.train.hooks import Hook, LoopState

if TYPE_CHECKING:
    from trainkit.estimate.gpus import Gpu


@dataclass(frozen=True)
class _Taken:
    """What the steps since the last row have come to, while their numbers are on their way.

    Attributes:
        step, epoch: of the last of them; ``num_steps`` are in it.
        norm: None where it is among the numbers.
    """

    step: int
    epoch: float | None
    num_steps: int
    norm: float | None
    rate: float
    counts: Mapping[str, float]
    seconds: float
    figures: Mapping[str, float]
    peak_bytes: int | None
    sizes: Mapping[str, int]
    numbers: Fetched


class Rows(Hook):
    """Adds up what the steps since the last row have come to, on each rank.

    The ranks' sums are added when a row is logged, and nothing else waits for the device.

    Attributes:
        loss_sum: 0-d, on the device.
        counts: steps, tokens and seconds since then.
        may_wait: a row is logged one step late, where nothing else needs it.
    """

    counts: dict[str, float]
    correct: torch.Tensor | None = None
    """Of the head, from before the checkpoint that a run goes on from."""
    _seconds_per_token: float | None = None
    _taken: _Taken | None = None

    def on_init_end(self, loop: LoopState) -> None:
        """The model is whole; later a rank may have a part of it."""
        max_length = loop.run.recipe.data.max_length
        self._seconds_per_token = seconds_per_token(loop.model, max_length)

    def begin(self, loop: LoopState, checkpoint: Path | None) -> None:
        """Begin to count; a continued run goes on with what was counted since its last row."""
        args, state = loop.args, loop.state
        self.may_wait = args.device.type == "cuda"
        self._heads = [each for each in loop.model.modules() if isinstance(each, LossHead)]
        self.loss_sum = torch.zeros((), device=args.device)
        self.logged_step = self._first = state.global_step
        self._total, self._began = 0.0, time.time()
        self._flops = self._tokens = 0.0
        self._tokens_before = state.num_input_tokens_seen
        self._flops_per_token = 6 * loop.model.num_parameters(exclude_embeddings=True)
        self._forget()
        if checkpoint is None or not window_file(checkpoint, args.process_index).is_file():
            return
        path = window_file(checkpoint, args.process_index)
        with taking_up(path):
            values = json.loads(path.read_text(encoding="utf-8"))
            counted = values["meter"]
            self.loss_sum = self.loss_sum + float(values["loss"])
            self.logged_step = int(values["logged_step"])
            self.counts = dict(counted["counts"])
            self.started = time.perf_counter() - self.counts.pop("seconds")
            if counted["correct"] is not None:
                self.correct = torch.tensor(counted["correct"], device=args.device)
            if counted["sources"] is not None and (own := loop.loss.train_metrics) is not None:
                sums = torch.tensor(counted["sources"], dtype=torch.float64, device=args.device)
                own.sums = sums

    def _forget(self) -> None:
        names = ("num_steps", "num_tokens", "num_trained_tokens", "data_seconds")
        self.counts = dict.fromkeys(names, 0)
        self.started = time.perf_counter()

    def before_step(
        self,
        loop: LoopState,
        micro: Sequence[dict[str, Any]],
        counts: Sequence[BatchCounts],
        seconds: float,
    ) -> None:
        if loop.run.numbers.leaves_out:  # the step may have to be left out
            own = loop.loss.train_metrics
            sums = None if own is None else own.sums
            self._before = None if sums is None else sums.clone()
        self.counts["num_steps"] += 1
        self.counts["data_seconds"] += seconds
        for each in counts if loop.layout.counts_rows else ():
            self.counts["num_tokens"] += each.num_tokens
            self.counts["num_trained_tokens"] += each.num_trained_tokens
        tokens = sum(batch["input_ids"].numel() for batch in micro)
        self._flops += float(self._flops_per_token * tokens)
        if loop.args.include_num_input_tokens_seen == "all":
            self._tokens += tokens
        elif loop.args.include_num_input_tokens_seen == "non_padding":
            pad = loop.tokenizer.pad_token_id
            masks = (batch.get("attention_mask", batch["input_ids"] != pad) for batch in micro)
            self._tokens += sum(int(mask.sum()) for mask in masks)

    def stepped(self, loop: LoopState, losses: Sequence[torch.Tensor]) -> None:
        """Add up the losses; tokens of a step that is left out stay counted: they were read."""
        before = self.loss_sum
        for each in losses:  # one by one: sums in another order are others
            self.loss_sum = self.loss_sum + each
        if loop.run.numbers.leaves_out:
            left_out = loop.guard.left_out > 0
            self.loss_sum = torch.where(left_out, before, self.loss_sum)
            own = loop.loss.train_metrics
            if own is not None and own.sums is not None:
                earlier = torch.zeros_like(own.sums) if self._before is None else self._before
                own.sums = torch.where(left_out, earlier, own.sums)

    def due(self, loop: LoopState) -> None:
        """Log the row; a GPU's when the next step is queued behind it, so that no step waits.

        Where something else is due, too, or no step follows, it is logged at once.
        """
        control, args = loop.control, loop.args
        earlier, self._taken = self._taken, None
        if control.should_log and loop.state.global_step > self.logged_step:
            self._taken = self._take(loop)
        if earlier is not None:
            self._log(loop, earlier)
        is_last = loop.is_over or control.should_training_stop
        looks_back = control.should_evaluate or control.should_save or is_last
        if looks_back or args.include_num_input_tokens_seen != "no" or not self.may_wait:
            self.settle(loop)

    def settle(self, loop: LoopState) -> None:
        """Log the row that waits for its numbers."""
        taken, self._taken = self._taken, None
        if taken is not None:
            self._log(loop, taken)

    def failed(self, loop: LoopState, error: Exception) -> None:
        """The steps before the one that failed are in the record."""
        if self._taken is not None and self._taken.step != getattr(error, "step", None):
            self.settle(loop)

    def _take(self, loop: LoopState) -> _Taken:
        """What the steps since the last row have come to; all ranks call it at the same step."""
        layout, stream, device = loop.layout, loop.stream, loop.args.device
        counts, began, step = self.counts, self.started, loop.state.global_step
        self._forget()
        of_host = {"seen": [self._flops, self._tokens]}
        of_host["counts"] = [counts["num_tokens"], counts["num_trained_tokens"]]
        if stream is not None:
            passes = [0 if p is None else p.epoch for p in stream.positions]
            rows = [stream.num_rows, stream.num_dropped, sum(passes), len(passes)]
            of_host["stream"] = [row * layout.counts_rows for row in rows]
        added = {name: on_device(values, device) for name, values in of_host.items()}
        if loop.loss.train_metrics is not None:
            own = loop.loss.train_metrics.take(device)
            added["own"] = own.flatten().double() * layout.counts_losses
        correct = self._take_correct()
        # Only some ranks have the head where a model is spread over several.
        nothing = torch.zeros(2, device=device)
        added["correct"] = (nothing if correct is None else correct).double()
        sums = loop.ranks.reduce(torch.cat(list(added.values())))
        alike = {"loss": loop.ranks.reduce(self.loss_sum, "mean")}
        if isinstance(loop.norm, torch.Tensor):
            alike["grad_norm"] = loop.norm
        numbers = torch.cat((sums, *(each.double().reshape(1) for each in alike.values())))
        num_steps = step - self.logged_step
        self.loss_sum = torch.zeros_like(self.loss_sum)
        self.logged_step, self._flops, self._tokens = step, 0.0, 0.0
        return _Taken(
            step=step,
            epoch=loop.state.epoch,
            num_steps=num_steps,
            norm=None if isinstance(loop.norm, torch.Tensor) else loop.norm,
            rate=loop.rate,
            counts=counts,
            seconds=self.started - began,
            figures=loop.engine.figures(),
            peak_bytes=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
            sizes={name: len(each) for name, each in added.items()} | dict.fromkeys(alike, 1),
            numbers=Fetched(numbers),
        )

    def _log(self, loop: LoopState, taken: _Taken) -> None:
        """Log a row, as soon as the device has come to its numbers."""
        state, numbers = loop.state, taken.numbers.tolist()
        found: dict[str, list[float]] = {}
        for name, size in taken.sizes.items():
            found[name], numbers = numbers[:size], numbers[size:]
        (mean,) = found["loss"]
        self._total += mean
        state.total_flos += found["seen"][0]
        state.num_input_tokens_seen += int(found["seen"][1])
        (norm,) = found.get("grad_norm", (taken.norm,))
        row: dict[str, Any] = {
            "loss": mean / taken.num_steps,
            "grad_norm": norm,
            "learning_rate": taken.rate,
        }
        loop.guard.flush(taken.step)
        row |= {**self._figures(loop, taken, found), **taken.figures}
        counted, left_out = loop.run.numbers.take_counts()
        num_skipped = loop.guard.take_skipped()
        if num_skipped or loop.args.fp16:
            row["num_skipped_steps"] = num_skipped
        if num_skipped and not 0 <= row.get("grad_norm", 0.0) < float("inf"):
            del row["grad_norm"]
        if left_out == counted and left_out:  # steps without an update are in no mean
            del row["loss"]
        elif left_out:
            row["loss"] *= counted / (counted - left_out)
        if loop.args.include_num_input_tokens_seen != "no":
            seen = state.num_input_tokens_seen - self._tokens_before
            row |= speed_metrics("train", self._began, num_tokens=seen)
        now = state.global_step, state.epoch
        state.global_step, state.epoch = taken.step, taken.epoch  # where trackers read them
        loop.log(row)
        state.global_step, state.epoch = now

    def _figures(
        self, loop: LoopState, taken: _Taken, sums: dict[str, list[float]]
    ) -> dict[str, float]:
        """Tokens, speed and the objective's figures."""
        num_tokens, num_trained = sums["counts"]
        seconds, num_steps = max(taken.seconds, 1e-9), max(taken.counts["num_steps"], 1)
        row: dict[str, float] = {
            "num_tokens": int(num_tokens),
            "num_trained_tokens": int(num_trained),
            "step_seconds": taken.seconds / num_steps,
            "tokens_per_second": num_tokens / seconds,
            "data_seconds": taken.counts["data_seconds"] / num_steps,
        }
        if loop.loss.train_metrics is not None:
            row |= loop.loss.train_metrics.rows(sums["own"])
        if loop.stream is not None:
            num_rows, num_dropped = map(int, sums["stream"][:2])
            loop.stream.stream.check_dropped(num_rows, num_dropped)
            row |= {"num_rows": num_rows, "num_dropped": num_dropped}
            row["num_passes"] = sums["stream"][2] / sums["stream"][3]
        correct, trained = sums["correct"]
        if trained:
            row["token_accuracy"] = correct / trained
        if self._seconds_per_token is not None:
            a_device = num_tokens / seconds / loop.ranks.num_processes
            row["mfu"] = a_device * self._seconds_per_token
        if taken.peak_bytes is not None:
            row["peak_memory_gib"] = taken.peak_bytes / 2**30
        return row

    def _take_correct(self) -> torch.Tensor | None:
        correct, earlier = take_correct(self._heads), self.correct
        self.correct = None
        if correct is None or earlier is None:
            return earlier if correct is None else correct
        return correct + earlier

    def _count(self, loop: LoopState) -> None:
        """What all ranks have computed and seen since the last call."""
        mine = on_device([self._flops, self._tokens], loop.args.device)
        flops, tokens = loop.ranks.reduce(mine).tolist()
        self._flops = self._tokens = 0.0
        loop.state.total_flos += flops
        loop.state.num_input_tokens_seen += int(tokens)

    def end(self, loop: LoopState) -> None:
        self.settle(loop)
        self._count(loop)
        total = self._total + self.loss_sum.item()
        num_steps = loop.state.global_step - self._first
        row = speed_metrics("train", self._began, num_steps=num_steps)
        row["total_flos"] = loop.state.total_flos
        loop.log({**row, "train_loss": total / max(num_steps, 0.001)})

    def save(self, loop: LoopState, save: Save) -> None:
        """What was counted since the last row, and an evaluation that is missed."""
        self.settle(loop)
        self._count(loop)
        misses = loop.stop.misses_evaluation
        if not misses and loop.state.global_step == self.logged_step:
            return
        self.correct = correct = self._take_correct()
        own = loop.loss.train_metrics
        sums = None if own is None else own.sums
        missed = "figures" if loop.hook(Evaluations).is_alone else "all"
        values = {
            "loss": float(self.loss_sum),  # JSON keeps every bit of a float
            "logged_step": self.logged_step,
            "meter": {
                "counts": {**self.counts, "seconds": time.perf_counter() - self.started},
                "correct": None if correct is None else correct.tolist(),
                "sources": None if sums is None else sums.tolist(),
            },
            "evaluation": missed if misses else None,
        }
        path, text = window_file(save.directory, loop.args.process_index), json.dumps(values)
        save.attempt(partial(path.write_text, text, encoding="utf-8"))


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


# Floating-point operations of a training step, and what GPUs could do at most, for MFU.


def seconds_per_token(model: Any, max_length: int) -> float | None:
    """Of this GPU at its dense bf16 peak; None where that is not known."""
    if not torch.cuda.is_available():
        return None
    from trainkit.estimate.gpus import gpu_named

    gpu = gpu_named(torch.cuda.get_device_name())
    return (
        None if gpu is None else training_flops_per_token(model, max_length) / gpu.teraflops / 1e12
    )


def training_flops_per_token(model: Any, max_length: int) -> float:
    """Forward and backward FLOPs per token: 6 per parameter that multiplies, plus causal attention.

    Counted as PaLM (arXiv:2204.02311, appendix B) counts them, attention halved because it is
    causal. The input embedding is a look-up and does not count, the output head does. A frozen
    weight needs no gradient of its own and counts 4. Of a mixture's experts, those count that a
    token is sent to.
    """
    config = model.config.get_text_config()
    trained = frozen = 0.0
    active_share = _active_share(config)
    counted: set[int] = set()
    embeddings = {id(p) for p in model.get_input_embeddings().parameters()}
    head = model.get_output_embeddings()
    head_parameters = {id(p) for p in head.parameters()} if head is not None else set()
    for name, parameter in model.named_parameters():
        is_lookup = id(parameter) in embeddings and id(parameter) not in head_parameters
        if id(parameter) in counted or is_lookup:
            continue
        counted.add(id(parameter))
        is_expert = ".experts." in name
        size = num_weights(parameter) * (active_share if is_expert else 1.0)
        trained += size if parameter.requires_grad else 0
        frozen += 0 if parameter.requires_grad else size
    attention = 6 * sum(heads * size for heads, size in attention_heads(config)) * max_length
    return 6.0 * trained + 4.0 * frozen + attention


def _active_share(config: Any) -> float:
    """The share of the routed experts that one token goes through; 1 without experts."""

    def first(*names: str) -> int | None:
        values = (getattr(config, name, None) for name in names)
        return next((value for value in values if isinstance(value, int) and value > 0), None)

    num_active = first("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k")
    num_experts = first("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return num_active / num_experts if num_active and num_experts else 1.0


_UNKNOWN_GPU = "a100-80g"
"""Whose speed is taken for a GPU that the table does not have."""


def this_gpu() -> Gpu | None:
    """This process's GPU with the memory that it really has; None without one."""
    if not torch.cuda.is_available():
        return None
    from trainkit.estimate.gpus import GPUS, gpu_named

    name = torch.cuda.get_device_name()
    row = gpu_named(name) or replace(GPUS[_UNKNOWN_GPU], name=name)
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return replace(row, memory_gib=total / 2**30)
