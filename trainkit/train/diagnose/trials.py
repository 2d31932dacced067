"""A kept batch replayed through the run's model, as it was or with something changed."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel

from trainkit.errors import TrainkitError
from trainkit.models.fp8.decide import Fp8Setup
from trainkit.objectives import OBJECTIVES
from trainkit.options import Fp8Options
from trainkit.recipe import Recipe, load_recipe
from trainkit.run import RunDirectory
from trainkit.run.files import read_json
from trainkit.run.starts import recorded_overrides
from trainkit.train.diagnose.replay import MicroBatch, Outcome, micro_batches, replay
from trainkit.train.faults.bad_batch import BadBatch
from trainkit.train.model import BuiltModel, build_model


@dataclass(frozen=True)
class Trial:
    """The batch with something changed.

    Attributes:
        what: was changed; empty for the run as it was.
        overrides: of the recipe.
        outcome: None where the model could not be built or run so.
        problem: why not.
        is_bad: the step could not be taken.
    """

    what: str
    overrides: tuple[str, ...]
    outcome: Outcome | None = None
    problem: str = ""
    is_bad: bool = True


class Bench:
    """Builds the run's model with overrides, and replays the batch through it."""

    def __init__(self, run: RunDirectory, kept: Sequence[BadBatch], weights: Path | None) -> None:
        self.run, self.kept, self.weights = run, kept, weights
        self.batches = micro_batches(kept)
        self.limit = kept[0].limit if kept[0].kind == "spike" else float("inf")

    def recipe(self, overrides: Sequence[str] = ()) -> Recipe:
        """The run's, with overrides."""
        run = self.run
        return load_recipe(
            run.recipe, overrides, bases=run.bases, recorded=recorded_overrides(run)
        ).recipe

    def build(self, recipe: Recipe) -> BuiltModel:
        """The model with the weights that are replayed."""
        source, adapters = recipe.model, None
        if recipe.lora is not None:
            adapters = self.weights
        elif self.weights is not None:
            source = source.replace(
                name_or_path=str(self.weights), revision=None, gguf_file=None, init="pretrained"
            )
        quantize = recipe.lora.quantize if recipe.lora else None
        options = Fp8Options.of(recipe.model.fp8 or quantize == "fp8")
        record = read_json(self.run.kernels) or {}
        recorded, attention = record.get("fp8"), recipe.model.attn_implementation
        if attention == "auto":
            attention = record.get("attention", {}).get("name", attention)
        samples = [
            {key: batch.values[key] for key in ("input_ids", "labels")} for batch in self.batches
        ]
        fp8 = None if options is None else Fp8Setup(options, samples, 1, recorded)
        return build_model(
            source,
            attention=attention,
            packing=recipe.data.packing,
            lora=recipe.lora,
            quantize=quantize,
            kernels=recipe.kernels,
            reentrant=False,
            device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
            fp8=fp8,
            adapters_from=adapters,
            is_proved=False,
        )

    def trial(
        self,
        what: str,
        overrides: Sequence[str] = (),
        *,
        look: Callable[[BuiltModel], None] = lambda _: None,
        without_adapters: bool = False,
        batches: Sequence[MicroBatch] | None = None,
    ) -> Trial:
        """Replay with overrides; what cannot be built so says why."""
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        try:
            recipe = self.recipe(overrides)
            built = self.build(recipe)
            look(built)
            model = built.model
            objective = OBJECTIVES[recipe.objective]
            chosen = self.batches if batches is None else batches
            if without_adapters and isinstance(model, PeftModel):
                with model.disable_adapter():
                    outcome = replay(model, objective, chosen, recipe.preference)
            else:
                outcome = replay(model, objective, chosen, recipe.preference)
        except (TrainkitError, torch.OutOfMemoryError) as error:
            said = error.what if isinstance(error, TrainkitError) else "out of memory"
            return Trial(what, tuple(overrides), problem=said)
        return Trial(what, tuple(overrides), outcome, is_bad=outcome.is_bad(self.limit))


def describe(trial: Trial) -> str:
    """One line."""
    what = trial.what or "as it ran"
    if trial.problem:
        return f"{what}: not tried: {trial.problem}"
    return f"{what}: {'bad' if trial.is_bad else 'good'}: {numbers(trial.outcome)}"


def numbers(outcome: Outcome | None) -> str:
    """What came of a replay, in a sentence."""
    if outcome is None:
        return "not tried"
    text = f"loss {outcome.loss:.4g}, grad_norm {outcome.grad_norm:.4g}"
    if outcome.first_module is not None:
        text += f"; the first output that is not finite is of {outcome.first_module}"
        text += f", whose inputs reach {outcome.largest_input:.3g}"
    elif outcome.first_gradient is not None:
        text += f"; the first gradient that is not finite is of {outcome.first_gradient}"
    return text
