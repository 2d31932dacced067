"""The record of the run, a stop that loses nothing, and what is proved before the first step."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerState

from trainkit.auto_class import without_adapters
from trainkit.errors import ModelError
from trainkit.objectives.objective import take_counts
from trainkit.run.metrics import MetricsWriter, read_metrics
from trainkit.run.report import CurveRefresher
from trainkit.run.starts import FILE
from trainkit.train.checkpoints import TRAINER_STATE
from trainkit.train.faults.signals import FAILED
from trainkit.train.hooks import Hook, LoopState
from trainkit.train.resume.record import write_start
from trainkit.train.run import Run

FEW_STEPS = 10
"""A run of fewer steps that nobody asked for is most likely a small file under a large batch."""


class RunRecorder(Hook):
    """Writes metrics, keeps the console and the curves up to date. Rank 0 only.

    The curves are drawn by another process, so that no step waits for matplotlib.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._console, self._stages = run.directory, run.console, run.stages
        self._metrics: MetricsWriter | None = None
        self._evaluated: set[int] = set()
        begins_again = run.options.resume is not None  # the rows so far are redone
        self._resume_step = run.point.step if run.point else 0 if begins_again else None
        self._passes: float | None = 0.0 if self._resume_step is None else None
        self._curves = CurveRefresher(self._run)
        self._has_stepped = False

    def begin(self, loop: LoopState, checkpoint: Path | None) -> None:
        """Write down what this start was given, and start the progress display.

        Only now: until here the run may still be refused, and is then as it was.
        """
        args, state = loop.args, loop.state
        write_start(loop.run)
        self._metrics = self._run.open_metrics(resume_step=self._resume_step)
        rows = read_metrics(self._run.metrics)
        self._evaluated = {
            row["step"] for row in rows if any(key.startswith("eval_") for key in row)
        }
        self._run.heartbeat(state.global_step)
        self._run.write_status("running", step=state.global_step, total_steps=state.max_steps)
        if args.max_steps <= 0 and state.max_steps < FEW_STEPS:  # else it was asked for
            self._console.warn(
                f"all data and epochs make {state.max_steps} optimizer steps, which hardly train a "
                "model: lower global_batch_size, or data.max_length (a packed row of that many "
                "tokens holds several conversations), or raise training.num_train_epochs"
            )
        self._console.start(state.max_steps, first_step=state.global_step)
        self._stages.end("trainer")

    def on_step_end(self, loop: LoopState) -> None:
        """Move the display and the heartbeat; after the first step, write where the time went."""
        self._console.step(loop.state.global_step)
        self._run.heartbeat(loop.state.global_step)
        if not self._has_stepped:
            self._has_stepped = True
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._stages.end("first step")
            self._run.write_json(self._run.root / FILE, self._stages.to_dict())

    def on_log(self, loop: LoopState, row: dict[str, Any]) -> None:
        step = loop.state.global_step
        row = {"step": step, **row}
        is_training = "loss" in row or "num_skipped_steps" in row
        if not is_training and not any(key.startswith("eval_") for key in row):
            return
        # A checkpoint is saved before the epoch's evaluation, which is then done once more.
        is_known = not is_training and step in self._evaluated
        if not math.isfinite(row.get("eval_loss", 0.0)):
            self._console.warn(
                f"eval_loss is {row['eval_loss']} at step {row['step']}: a row of data.eval "
                "overflows, and nothing can be judged by it, the best checkpoint neither; training "
                "goes on, since its own numbers are finite"
            )
        if self._metrics is not None and not is_known:
            self._metrics.append(row)
        self._console.log(row)
        passes = row.get("num_passes")
        if passes is not None:
            number = math.ceil(passes) + 1
            if self._passes is not None and number > math.ceil(self._passes) + 1:
                self._console.note(
                    f"by step {step} the stream has begun pass {number} over its files"
                )  # rows come that were trained on before
            self._passes = passes
        self._curves.refresh(has_news=not is_training)

    def on_save(self, loop: LoopState) -> None:
        self._curves.refresh(has_news=True)
        # With the rows so far: one that is killed goes on from here.
        self._run.write_status("running", step=loop.state.global_step)

    def finish(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
        self._curves.close()


class StopOnRequest(Hook):
    """Ends a run at the end of a step: one process at once, several when all of them know."""

    def on_step_end(self, loop: LoopState) -> None:
        """Save and stop; an evaluation that is due is made up for when the run goes on.

        The last step is logged in any case: the record then has every step's tokens and seconds.
        """
        control, state, stop = loop.control, loop.state, loop.stop
        if state.global_step >= state.max_steps and loop.args.logging_strategy != "no":
            control.should_log = True
        if loop.args.world_size == 1:
            stop.agreed = stop.number
        if stop.agreed:
            control.should_save = stop.has_saved = stop.agreed != FAILED
            stop.misses_evaluation = control.should_evaluate
            control.should_training_stop = True
            control.should_evaluate = False

    def on_epoch_end(self, loop: LoopState) -> None:
        """Leave out what the end of an epoch would bring: the user is waiting."""
        if loop.stop.agreed:
            loop.control.should_evaluate = loop.control.should_save = False


class KeepToThePlan(Hook):
    """Says that a continued run has another plan, which bends the learning rate."""

    def begin(self, loop: LoopState, checkpoint: Path | None) -> None:
        assert checkpoint is not None
        last = loop.state.max_steps
        saved = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE))
        if saved.max_steps != last:
            loop.run.console.warn(
                f"the run was planned for {saved.max_steps} steps and ends at {last} "
                "now; the learning rate follows the new plan from here"
            )


class MarkProgress(Hook):
    """Tells the watch how far this rank has come."""

    def on_step_end(self, loop: LoopState) -> None:
        if (watch := loop.run.watch) is not None:
            watch.factor = 1.0
            watch.mark(f"after step {loop.state.global_step}")

    def on_substep_end(self, loop: LoopState) -> None:
        if (watch := loop.run.watch) is not None:
            watch.mark(f"in step {loop.state.global_step + 1}")


class LeakTest(Hook):
    """Proves, before the first step, that the documents of a packed row do not see each other.

    On every rank and through the wrapped model: under ZeRO-3 the weights are there in no other way.
    """

    def begin(self, loop: LoopState, checkpoint: Path | None) -> None:
        from trainkit.models.leak_test import leak_test

        leak_test(
            loop.engine.runnable(loop.model),
            attention=loop.run.built.attention.name,
            vocab_size=loop.model.config.get_text_config().vocab_size,
            split=loop.layout.rows,
        )


MOST_LOOKED_AT = 1000
"""Rows, to find one with an image."""


class SeeImages(Hook):
    """From the first step on, every batch calls the modules that see images, where it must."""

    def begin(self, loop: LoopState, checkpoint: Path | None) -> None:
        """After the proofs that look at tokens alone, and one that looks at an image."""
        if loop.run.recipe.data.packing:
            self._prove_apart(loop)
        sight = without_adapters(loop.model).base_model.sight
        sight.is_everywhere, sight.is_sharded = True, not loop.engine.holds_whole_model

    def _prove_apart(self, loop: LoopState) -> None:
        from trainkit.models.leak_test import image_leak_test

        data = loop.train_data
        items = (data.samples[index] for index in range(min(len(data.samples), MOST_LOOKED_AT)))
        row = next((row for row in items if any(each.get("images") for each in row)), None)
        if row is None:
            return
        batch = data.collator([row])
        take_counts(batch, lambda batch, num_trained: num_trained)
        image_leak_test(
            loop.engine.runnable(loop.model),
            loop.prepare(batch),
            token_id=loop.model.config.image_token_id,
            attention=loop.run.built.attention.name,
        )


class RowTest(Hook):
    """Proves, before the first step, that rows which ranks share are computed as whole ones."""

    def begin(self, loop: LoopState, checkpoint: Path | None) -> None:
        from trainkit.models.row_test import row_test

        rows = loop.layout.rows
        assert rows is not None
        vocab_size = loop.model.config.get_text_config().vocab_size
        row_test(loop.model, rows, vocab_size=vocab_size, dtype=_computes_in(loop))


def _computes_in(loop: LoopState) -> torch.dtype:
    args, own = loop.args, loop.model.config.dtype or torch.float32
    flags = {torch.bfloat16: args.bf16, torch.float16: args.fp16, own: True}
    return max((each for each in flags if flags[each]), key=lambda one: torch.finfo(one).eps)


class SharedPrompts(Hook):
    """Proves, before the first step, that answers which share a prompt are those with their own."""

    def begin(self, loop: LoopState, checkpoint: Path | None) -> None:
        from trainkit.models.attention import NAME
        from trainkit.models.attention.proof import require_shared_prompts

        name = loop.run.built.attention.name
        if name != NAME:
            raise ModelError(
                f"{loop.model.config.model_type} attends by {name}, which has no way for two "
                "answers to attend to one prompt",
                where="preference.share_prompts",
                fix="set it to false",
            )
        model = loop.engine.runnable(loop.model)
        require_shared_prompts(model, attention=name, dtype=_computes_in(loop))


class KeepFp8Codes(Hook):
    """Has weights quantised once between two optimizer steps, and says when they have changed."""

    def begin(self, loop: LoopState, checkpoint: Path | None) -> None:
        """Begin, when a checkpoint's weights have been loaded."""
        from trainkit.models.fp8.trained import KeptCodes

        self._kept = KeptCodes(loop.model)

    def on_pre_optimizer_step(self, loop: LoopState) -> None:
        """The codes have served; the optimizer may have their memory."""
        self._kept.weights_changed()

    def on_step_end(self, loop: LoopState) -> None:
        self._kept.weights_changed()

    def on_train_end(self, loop: LoopState) -> None:
        self._kept.stop()


# NEFTune: noise on the embeddings while a model trains (``training.neftune_noise_alpha``).


class EmbeddingNoise(Hook):
    """Uniform noise of at most alpha / sqrt(tokens of a row * hidden size)."""

    _handle: Any = None

    def begin(self, loop: LoopState, checkpoint: Path | None) -> None:
        alpha = loop.args.neftune_noise_alpha

        def disturb(module: nn.Module, _: Any, embedded: torch.Tensor) -> torch.Tensor:
            if not module.training:
                return embedded
            size = float(alpha / torch.tensor(embedded.shape[1] * embedded.shape[2]).sqrt())
            return embedded + torch.zeros_like(embedded).uniform_(-size, size)

        self._handle = loop.model.get_input_embeddings().register_forward_hook(disturb)

    def end(self, loop: LoopState) -> None:
        if self._handle is not None:
            self._handle.remove()
