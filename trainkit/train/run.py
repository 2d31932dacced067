"""The context of a run: what was typed, what was made of it so far, and where it is kept.

`trainkit.train.build.run_sft` fills it from top to bottom; everybody else reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.parallel import Layout, Machine, ProcessRank
from trainkit.recipe import LoadedRecipe, Recipe, SftOptions
from trainkit.run import Console, RunDirectory
from trainkit.run.starts import Stages
from trainkit.train.faults.numbers import NumberPolicy
from trainkit.train.faults.signals import StopRequest
from trainkit.train.resume.changes import Review

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase, TrainingArguments

    from trainkit.data.messages import Conversation
    from trainkit.data.options import DataOptions
    from trainkit.data.vision import NoVision, Vision
    from trainkit.estimate.estimate import Estimate
    from trainkit.evals.metrics import AnswerMetric
    from trainkit.evals.tasks import LoadedTasks
    from trainkit.train.checkpoints import CheckpointWriter, ResumePoint
    from trainkit.train.data import RunData
    from trainkit.train.faults.watch import Watch
    from trainkit.train.model import BuiltModel


@dataclass
class Run:
    """One ``trainkit sft`` as this process sees it.

    Attributes:
        console: speaks on rank 0.
        stages: times the way to the first step.
        config: the model's, as its files have it.
        vision: how the model takes images, or why none are read; None of a model of text.
        tasks: the questions of benchmarks; None where there are none.
        expected: the estimate of memory and time; None on a CPU.
        fingerprint: data, processes and versions, which a continued run must share.
        point: the checkpoint it continues from; None begins at step 0.
        teacher: the model that is learnt from, or compared with; None without one.
        numbers: what to do about steps whose numbers are bad, and the steps so far.
        watch: hears how far this rank has come.
    """

    loaded: LoadedRecipe
    options: SftOptions
    process: ProcessRank
    console: Console
    stages: Stages = field(default_factory=Stages)
    layout: Layout = field(init=False)
    config: PreTrainedConfig = field(init=False)
    tokenizer: PreTrainedTokenizerBase = field(init=False)
    data: RunData = field(init=False)
    args: TrainingArguments = field(init=False)
    held_out: Sequence[Conversation] = ()
    metrics: Sequence[AnswerMetric] = ()
    data_options: DataOptions = field(init=False)
    vision: Vision | NoVision | None = None
    tasks: LoadedTasks | None = None
    expected: Estimate | None = None
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    point: ResumePoint | None = None
    review: Review = field(default_factory=Review)
    directory: RunDirectory = field(init=False)
    built: BuiltModel = field(init=False)
    teacher: Any = None
    checkpoints: CheckpointWriter = field(init=False)
    numbers: NumberPolicy = field(default_factory=NumberPolicy)
    stop: StopRequest = field(default_factory=StopRequest)
    watch: Watch | None = None

    @property
    def recipe(self) -> Recipe:
        return self.loaded.recipe

    @property
    def machine(self) -> Machine:
        import torch

        return Machine(self.process.world_size, on_cpu=not torch.cuda.is_available())

    @property
    def root(self) -> Path:
        return self.directory.root
