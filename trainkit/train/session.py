"""One training session: the loop with everything around it, and what it leaves behind."""

import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from peft import PeftModel
from transformers import (
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainingArguments,
)

from trainkit.auto_class import auto_class
from trainkit.errors import CheckpointError, StoppedError
from trainkit.estimate.estimate import Estimate
from trainkit.models.checks.row_test import refuse_unsplittable
from trainkit.parallel import Layout
from trainkit.parallel.agreement import decided_by_main
from trainkit.run import Console, RunDirectory
from trainkit.run.going_on import resume_command
from trainkit.run.metrics import read_metrics
from trainkit.run.model_card import model_card, write_model_card
from trainkit.run.report.redraw import draw_all
from trainkit.run.stages import Stages
from trainkit.train.callbacks import (
    KeepFp8Codes,
    KeepToThePlan,
    LeakTest,
    RowTest,
    RunRecorder,
    StopOnRequest,
    TimeStart,
)
from trainkit.train.checkpoints import CheckpointWriter, ResumePoint, written_together
from trainkit.train.data.run_data import RunData
from trainkit.train.faults.bad_batch import WEIGHTS, folder_of
from trainkit.train.faults.bad_numbers import NumberPolicy
from trainkit.train.faults.disk import checkpoint_bytes, refuse_small_disk
from trainkit.train.faults.shortage import (
    MemoryShortageError,
    is_shortage,
    num_tokens,
    out_of_memory,
)
from trainkit.train.faults.signals import StopRequest, saving_on_signals
from trainkit.train.faults.smaller_batch import BatchFinder, TryLongestBatch
from trainkit.train.faults.watch import MarkProgress, Watch
from trainkit.train.log.flops import peak_flops, training_flops_per_token
from trainkit.train.log.rows import KEPT_ROWS
from trainkit.train.log.trackers import RememberTrackers, go_on_with
from trainkit.train.loop import Loop
from trainkit.train.memory import MemoryRecord
from trainkit.train.model import BuiltModel
from trainkit.train.optimizer.finite import NumberError
from trainkit.train.optimizer.make import OptimizerPlan
from trainkit.train.recompute.budget import RECORD, read_record
from trainkit.train.recompute.callback import (
    BudgetSetup,
    KeepToBudget,
    RecomputeLayers,
    Wanted,
)
from trainkit.train.refusals import settings_refused_by
from trainkit.train.results.finish import AfterTraining, answer_held_out, best_of, save_final
from trainkit.train.resume.changes import Review
from trainkit.train.resume.take_up import TakeUp


@dataclass(frozen=True)
class Session:
    """Everything a run has before its first step.

    Attributes:
        run: the run directory.
        console: speaks on rank 0.
        args: transformers' arguments.
        layout: how the run is spread over processes.
        tokenizer: of the model.
        data: what is trained and evaluated on.
        built: the model.
        fingerprint: data, processes and versions, which a continued run must share.
        settings: every value of the recipe as it is used.
        begin: writes down what this start was given; called when nothing can refuse it any more.
        recompute: what is recomputed in the backward pass.
        max_length: tokens per sample, for MFU.
        is_packed: several documents share a row.
        optimizer_plan: what the recipe says of the optimizer besides ``args``.
        is_main: whether this rank writes.
        after: what to do with the trained model.
        batch: finds the micro-batch that fits.
        review: what a continued run does otherwise than its checkpoint.
        numbers: what to do about steps whose numbers are bad.
        step_timeout: seconds without progress after which a run is taken to hang.
        expected: the estimate of memory and time; None on a CPU.
        stages: times the way to the first step.
        begins_again: the run was stopped before its first checkpoint; its rows are redone.
    """

    run: RunDirectory
    console: Console
    args: TrainingArguments
    layout: Layout
    tokenizer: PreTrainedTokenizerBase
    data: RunData
    built: BuiltModel
    fingerprint: Mapping[str, Any]
    settings: Mapping[str, Any]
    begin: Callable[[TrainingArguments], None]
    recompute: Wanted
    max_length: int
    is_packed: bool
    optimizer_plan: OptimizerPlan
    is_main: bool
    numbers: NumberPolicy
    step_timeout: float | None
    after: AfterTraining
    batch: BatchFinder
    review: Review = field(default_factory=Review)
    begins_again: bool = False
    expected: Estimate | None = None
    stages: Stages = field(default_factory=Stages)

    def train(self, point: ResumePoint | None) -> NumberError | MemoryShortageError | None:
        """Train, from the beginning or from ``point``, and write the final model and the report.

        Returns:
            None when the run is done; else what is bad in a step that it must go back behind.

        Raises:
            MemoryShortageError: a step does not fit, and nothing smaller is to be tried.
            NumberError: a step is bad, and the recipe says to stop.
            StoppedError: the run was asked to stop; a checkpoint is written.
            ResumeRefusedError: ``point`` is beyond the recipe's last step.
        """
        stop = StopRequest()
        loop = self.loop(stop)
        if point is not None:
            loop.add_callback(KeepToThePlan(point, self.console, self.layout.process))
            loop.add_callback(TakeUp(loop, self.review, point.checkpoint, self.console.note))
        recorder = self._recorder(point)
        if recorder is not None:
            loop.add_callback(recorder)
            loop.add_callback(RememberTrackers(self.run))
            loop.add_callback(TimeStart(self.stages, self.run))
            for note in go_on_with(self.run, self.args, goes_on=point is not None):
                self.console.note(note)
        if self.expected is not None:
            about = self.expected, self.run, self.console, self.layout.process
            record = MemoryRecord(*about, is_exact=self.is_packed, is_continued=point is not None)
            loop.add_callback(record)
        if self.batch.can_try:  # after the record of this start
            loop.add_callback(TryLongestBatch(self.batch, loop))
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()  # loading and checking the model is another matter
        decided_by_main(self.layout.process, lambda: refuse_small_disk(loop, self.run.root))
        loop.checkpoints.needed = lambda: checkpoint_bytes(loop)
        watch = self._watch()
        loop.watch = watch
        loop.add_callback(MarkProgress(watch))
        with watch.watching():
            return self._train(loop, stop, point, recorder)

    def _train(
        self,
        loop: Loop,
        stop: StopRequest,
        point: ResumePoint | None,
        recorder: RunRecorder | None,
    ) -> NumberError | MemoryShortageError | None:
        started = time.perf_counter()
        with saving_on_signals(stop, self.console.note):
            try:
                loop.train(None if point is None else str(point.checkpoint))
            except (RuntimeError, MemoryError) as error:
                if not is_shortage(error):
                    raise
                shortage = out_of_memory(loop, self.expected, error)
                if not self.batch.goes_back(shortage):
                    raise self.batch.for_resuming(shortage) from error
                return self._going_back(recorder, shortage)
            except MemoryShortageError as error:
                if not self.batch.goes_back(error):
                    raise
                return self._going_back(recorder, error.with_traceback(None))
            except NumberError as error:
                if recorder is not None:
                    recorder.finish()
                if self.numbers.goes_back and not stop.is_wanted:
                    return error.with_traceback(None)  # which would keep the model alive
                self._keep_weights(loop, error)
                raise
        if loop.watch is not None:
            loop.watch.stop_timing()
        seconds = time.perf_counter() - started
        if recorder is not None:
            recorder.finish()
            rows = loop.state.log_history
            # Of a long run the state has the last rows only.
            is_whole = len(rows) <= KEPT_ROWS
            self.run.write_json(
                self.run.log_history, rows if is_whole else read_metrics(self.run.metrics)
            )
        if stop.has_saved:
            self.console.stop()
            self.console.note(f"continue with: {resume_command(self.run.root)}")
            raise StoppedError(stop.agreed, stop.why)
        self._finish(loop, seconds)
        return None

    @staticmethod
    def _going_back(
        recorder: RunRecorder | None, error: MemoryShortageError
    ) -> MemoryShortageError:
        if recorder is not None:
            recorder.finish()
        return error

    def _keep_weights(self, loop: Loop, error: NumberError) -> None:
        """Write down the weights that met a bad step, for `trainkit diagnose`; all ranks are here.

        What cannot be written must not hide what happened.
        """
        target = folder_of(self.run.root, error.step) / WEIGHTS
        try:
            with written_together(target, loop.ranks, {"step": error.step}, replace=True) as inner:
                loop.save_model(inner)
        except CheckpointError as problem:
            self.console.warn(f"the weights of the step could not be kept: {problem.what}")

    def loop(self, stop: StopRequest, kind: type[Loop] = Loop) -> Loop:
        """The loop with the callbacks that every run has.

        Raises:
            RecipeError: transformers refuses the settings.
        """
        config = self.built.model.config
        if self.args.ddp_find_unused_parameters is None:
            # Only a tower next to the text model has weights that no text reaches; looking for
            # such weights costs a walk of the graph every step.
            self.args.ddp_find_unused_parameters = config.get_text_config() is not config
        with settings_refused_by("the loop", "training"):
            loop = kind(
                model=self.built.model,
                args=self.args,
                layout=self.layout,
                tokenizer=self.tokenizer,
                train_data=self.data.train,
                eval_data=self.data.eval,
                checkpoints=CheckpointWriter(
                    self.run.root,
                    self.fingerprint,
                    self.settings,
                    committed=lambda path: self.console.note(f"saved {path}"),
                    failed=stop.fail,
                ),
                stop=stop,
                objective=self.data.objective,
                numbers=self.numbers,
                warn=self.console.warn,
                optimizer_plan=self.optimizer_plan,
                flops_per_token=training_flops_per_token(self.built.model, self.max_length),
                peak_flops=peak_flops(),
            )
        stop_ids = self.data.stop_token_ids
        self.after.questions.attach(loop, self.tokenizer, stop_ids, self.console.note)
        loop.add_callback(StopOnRequest(stop))
        loop.add_callback(self._recompute(loop))
        if self.built.fp8 is not None:
            loop.add_callback(KeepFp8Codes(self.built.model))
        self._add_proofs(loop)
        return loop

    def _add_proofs(self, loop: Loop) -> None:
        """What is proved of the model as it trains, before the first step."""
        config, rows, name = self.built.model.config, self.layout.rows, self.built.attention.name
        vocab_size = config.get_text_config().vocab_size
        if rows is not None:
            takes = loop.takes_num_items
            model = self.built.model
            base = model.get_base_model() if isinstance(model, PeftModel) else model
            refuse_unsplittable(base, rows, attention=name, takes_num_items=takes)
            dtype = config.dtype or torch.float32
            loop.add_callback(RowTest(rows, vocab_size, dtype))
        if self.is_packed:
            runnable = self.layout.engine.runnable
            loop.add_callback(LeakTest(name, vocab_size, runnable, rows))

    def _recompute(self, loop: Loop) -> TrainerCallback:
        options, model = self.recompute.options, self.built.model
        if options is None or options.budget_gib is None:
            return RecomputeLayers(model, self.recompute)
        lengths = getattr(self.data.train.samples, "lengths", None)
        longest = self.max_length if lengths is None else int(max(lengths))
        setup = BudgetSetup(
            options.budget_gib,
            offload=self.args.device.type == "cuda" and options.offload is not False,
            largest_batch=longest * self.args.per_device_train_batch_size,
            this_batch=lambda: num_tokens(loop.latest_batch),
            num_ranks=self.layout.process.world_size,
            say=self.console.note,
            warn=self.console.warn,
            record=self.run.root / RECORD if self.is_main else None,
            known=read_record(self.run.root / RECORD),
        )
        return KeepToBudget(model, setup)

    def _watch(self) -> Watch:
        """The ranks' watch over one another; all of them make it together."""
        folder = self.run.logs / "ranks"
        launch = [""]
        if self.is_main:
            shutil.rmtree(folder, ignore_errors=True)  # of a start that was killed
            launch[0] = uuid.uuid4().hex
        process = self.layout.process
        if process.world_size > 1:
            broadcast_object_list(launch)

        return Watch(
            folder,
            dist_rank=process.dist_rank,
            world_size=process.world_size,
            launch=launch[0],
            step_timeout=self.step_timeout,
            record=lambda reason: self.run.write_status("failed", reason=reason),
        )

    def _recorder(self, point: ResumePoint | None) -> RunRecorder | None:
        if not self.is_main:
            return None
        resume_step = 0 if self.begins_again else None
        return RunRecorder(
            self.run,
            self.console,
            resume_step=resume_step if point is None else point.step,
            begin=self.begin,
        )

    def _finish(self, loop: Loop, seconds: float) -> None:
        """The final model first, then everything that only describes it."""
        self.console.doing("writing the model")
        save_final(
            loop,
            self.run.final,
            tokenizer=self.tokenizer,
            stop_token_ids=self.data.stop_token_ids,
            metadata={"step": loop.state.global_step},
            card=model_card(self.run, **self._card_facts()) if self.is_main else None,
        )
        summary: dict[str, object] = {}
        questions = self.after.questions
        if questions.generation is not None:
            self.console.doing("answering questions")
            stop_token_ids = self.data.stop_token_ids
            result = answer_held_out(
                loop, self.run.final, self.tokenizer, stop_token_ids, questions
            )
            others = {name: each for name, each in result.means.items() if name != "exact_match"}
            summary |= {name: f"{each:.4f} on held-out answers" for name, each in others.items()}
            summary["exact match"] = f"{result.accuracy:.1%} of {result.num_total} held-out answers"
            if self.is_main:
                self.run.write_json(self.run.generation_eval, result.to_dict())
        if not self.is_main:
            return
        self.console.doing("drawing the report")
        write_model_card(self.run, **self._card_facts())
        draw_all(self.run)
        rows = [row for row in loop.state.log_history if "loss" in row]
        figures = {
            "steps": loop.state.global_step,
            "loss": f"{rows[0]['loss']:.4f} -> {rows[-1]['loss']:.4f}" if rows else "none",
            **best_of(loop),
            "time": f"{seconds:.0f} s",
            **summary,
            "model": self.run.final,
            "report": self.run.report,
        }
        self.console.finish(figures)
        loop.hub.push_final(self.run.final)

    def _card_facts(self) -> dict[str, Any]:
        """What the model card says of the model itself."""
        model = self.built.model
        is_adapter = isinstance(model, PeftModel)
        loader = auto_class(model.config).__name__
        return {"base_model": self.after.base_model, "loader": loader, "adapter": is_adapter}
