"""From a kept batch to the culprit: one thing changed at a time, until the step can be taken.

Every change is an override of the recipe, so what helps in the replay can be typed after
``--resume``.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from trainkit.checkpoint.whole.manifest import verify_directory
from trainkit.errors import RunDirectoryError, TrainkitError
from trainkit.models.fp8.decide import Fp8Setup
from trainkit.objectives import OBJECTIVES
from trainkit.options import Fp8Options
from trainkit.recipe import Recipe, load_recipe
from trainkit.run import RunDirectory
from trainkit.run.files import read_json
from trainkit.run.starts import recorded_overrides, step_of
from trainkit.train.diagnose.replay import (
    MicroBatch,
    Outcome,
    micro_batches,
    replay,
    single_rows,
    unsound_weights,
)
from trainkit.train.faults.bad_batch import (
    WEIGHTS,
    BadBatch,
    folder_of,
    read_batches,
    steps_kept,
)
from trainkit.train.model import BuiltModel, build_model

PLAIN = ("kernels=false", "model.attn_implementation=eager")
_FP8 = {"fp8 base": "lora.quantize=null", "fp8 products": "model.fp8=false"}


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


@dataclass
class Diagnosis:
    """What was found.

    Attributes:
        step: whose batch it is.
        says: what the run said of it.
        weights: the directory that was loaded.
        are_the_steps: the weights are those that met the batch, not those of a checkpoint before.
        culprit: weights, kernel, attention, fp8, quantize, dtype, adapters, rows, model; None where
            the batch is not bad any more.
        name: of the kernel, the weight, the rows.
        because: the reason with its numbers.
        fix: what to do.
        trials: every one.
    """

    step: int
    says: str
    weights: str
    are_the_steps: bool
    culprit: str | None = None
    name: str = ""
    because: str = ""
    fix: str = ""
    trials: list[Trial] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


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
                    outcome = replay(model, objective, chosen)
            else:
                outcome = replay(model, objective, chosen)
        except (TrainkitError, torch.OutOfMemoryError) as error:
            said = error.what if isinstance(error, TrainkitError) else "out of memory"
            return Trial(what, tuple(overrides), problem=said)
        return Trial(what, tuple(overrides), outcome, is_bad=outcome.is_bad(self.limit))


def diagnose(
    run: RunDirectory, step: int | None, say: Callable[[str], None] = lambda _: None
) -> Diagnosis:
    """Replay the batch of a bad step and name the culprit.

    Args:
        run: the run.
        step: one of those whose batch was kept; None takes the last.
        say: told of each trial.

    Raises:
        RunDirectoryError: no batch was kept, or it is damaged.
        TrainkitError: the model cannot be built as the run had it.
    """
    kept_steps = steps_kept(run.root)
    step = kept_steps[-1] if step is None and kept_steps else step
    if step is None or step not in kept_steps:
        known = ", ".join(map(str, kept_steps)) or "none"
        raise RunDirectoryError(
            f"no batch of {'a step' if step is None else f'step {step}'} was kept (kept: {known}): "
            "a run keeps the batch of a step whose loss or gradient is bad",
            where=str(run.root),
        )
    kept = read_batches(folder_of(run.root, step))
    weights, are_the_steps = _weights_of(run, step)
    bench = Bench(run, kept, weights)
    found = Diagnosis(step, kept[0].says, str(weights or "the base model"), are_the_steps)
    unsound: list[str] = []

    def tell(trial: Trial) -> Trial:
        found.trials.append(trial)
        say(describe(trial))
        return trial

    first = tell(bench.trial("", look=lambda built: unsound.extend(unsound_weights(built.model))))
    if first.problem:
        raise TrainkitError(
            f"the run's model cannot be built: {first.problem}", where=str(run.root)
        )
    if unsound:
        _blame_weights(found, unsound, run)
    elif first.is_bad:
        assert first.outcome is not None
        _bisect(found, bench, first.outcome, tell)
    else:
        found.because = "the batch is not bad here: " + _numbers(first.outcome)
        found.fix = (
            "the fault is not in these weights and this batch alone: a device that computed wrong, "
            "other ranks' gradients, or chance (dropout). Go on with the run; "
            "faults.on_bad_numbers: roll_back does so by itself"
            if are_the_steps
            else f"the weights are those of {found.weights}, from before step {step}; replay a run "
            "that stopped (on_bad_numbers: stop keeps the weights too)"
        )
    return found


def _weights_of(run: RunDirectory, step: int) -> tuple[Path | None, bool]:
    """The step's own weights, else those of the last checkpoint before it, else the base's."""
    own = folder_of(run.root, step) / WEIGHTS
    if own.is_dir():
        verify_directory(own)
        return own, True
    before = [path for path in run.root.glob("checkpoint-*") if 0 <= step_of(path) < step]
    for path in sorted(before, key=step_of, reverse=True):
        if any(path.glob("*model*.safetensors")):
            verify_directory(path)
            return path, step_of(path) == step - 1
    return None, step == 1


def _blame_weights(found: Diagnosis, unsound: Sequence[str], run: RunDirectory) -> None:
    found.culprit, found.name = "weights", unsound[0]
    more = f" and {len(unsound) - 1} more" if len(unsound) > 1 else ""
    found.because = f"{unsound[0]}{more}: NaN or infinite numbers in the weights themselves"
    found.fix = (
        f"an update before step {found.step} made them: go on from the last checkpoint with a "
        f"lower rate (trainkit sft --resume {run.root} training.learning_rate=...), or, where the "
        "base model itself has them, load it again"
    )


def _bisect(found: Diagnosis, bench: Bench, first: Outcome, tell: Callable[[Trial], Trial]) -> None:
    """One change after the other; the first that helps names the culprit."""
    for kind, name, trial in _changes(bench, tell):
        if trial.problem or trial.is_bad:
            continue
        found.culprit, found.name = kind, name
        found.because = f"as it ran: {_numbers(first)}; {trial.what}: {_numbers(trial.outcome)}"
        typed = " ".join(trial.overrides)
        found.fix = (
            f"trainkit sft --resume {bench.run.root} {typed}"
            if typed
            else (
                "the trained adapters have grown too large: go on from the last checkpoint with a "
                "lower training.learning_rate"
            )
        )
        if kind == "dtype":
            found.fix = (
                "the numbers overflow what the dtype can hold: begin a new run with "
                "model.dtype=float32 (or bfloat16 in place of float16), or a lower rate"
            )
        return
    _blame_rows(found, bench, first, tell)


def _changes(bench: Bench, tell: Callable[[Trial], Trial]) -> Iterator[tuple[str, str, Trial]]:
    """Kind and name of what each trial leaves out, the cheapest and likeliest first."""
    recipe = bench.recipe()
    if recipe.kernels:
        off = tell(bench.trial("without kernels", ["kernels=false"]))
        if not off.is_bad:
            yield from _single_kernels(bench, recipe, tell)
            yield "kernel", "several", off
    if recipe.model.attn_implementation != "eager":
        other = ["model.attn_implementation=eager"]
        yield "attention", _attention(bench.run), tell(bench.trial("eager attention", other))
    if recipe.model.fp8 and recipe.lora is None:
        yield "fp8", "products", tell(bench.trial("without fp8", ["model.fp8=false"]))
    if recipe.lora is not None and recipe.lora.quantize is not None:
        overrides = ["lora.quantize=null", *(["model.fp8=false"] if recipe.model.fp8 else [])]
        what = f"{recipe.lora.quantize} base"
        yield "quantize", what, tell(bench.trial("a base in its own dtype", overrides))
    if recipe.model.dtype != "float32":
        wide = ["model.dtype=float32", *_narrow_flags(recipe)]
        yield "dtype", str(recipe.model.dtype), tell(bench.trial("in float32", wide))
    if recipe.lora is not None:
        yield "adapters", "lora", tell(bench.trial("without adapters", without_adapters=True))


def _single_kernels(
    bench: Bench, recipe: Recipe, tell: Callable[[Trial], Trial]
) -> Iterator[tuple[str, str, Trial]]:
    record = read_json(bench.run.kernels) or {}
    running = [row["op"] for row in record.get("ops", []) if row["status"] == "on"]
    given: Mapping[str, bool] = recipe.kernels if isinstance(recipe.kernels, dict) else {}
    for op in running:
        switches = {**{key: on for key, on in given.items() if not on}, op: False}
        text = ", ".join(f"{key}: false" for key in switches)
        yield "kernel", op, tell(bench.trial(f"without {op}", [f"kernels={{{text}}}"]))


def _narrow_flags(recipe: Recipe) -> list[str]:
    """What goes with a narrow dtype only."""
    flags = [key for key in ("fp16", "bf16") if recipe.training.get(key)]
    return [f"training.{key}=false" for key in flags]


def _attention(run: RunDirectory) -> str:
    record = read_json(run.kernels) or {}
    return str(record.get("attention", {}).get("name", "as chosen"))


def _blame_rows(
    found: Diagnosis, bench: Bench, first: Outcome, tell: Callable[[Trial], Trial]
) -> None:
    """Nothing that can be switched off helps: some rows, or the model whatever it reads."""
    rows = [row for batch in bench.batches for row in single_rows(batch)]
    bad = []
    for row in rows:
        trial = bench.trial(f"{row.rows[0]} alone", batches=[row])
        if trial.is_bad and not trial.problem:
            bad.append(tell(trial))
    if bad and len(bad) < len(rows):
        names = [trial.outcome.rows[0] for trial in bad if trial.outcome]
        found.culprit, found.name = "rows", ", ".join(names)
        found.because = (
            f"{len(names)} of {len(rows)} rows are bad by themselves, in plain torch as well: "
            f"{_numbers(bad[0].outcome)}"
        )
        found.fix = "look at them (trainkit data preview), correct them or take them out"
        return
    found.culprit, found.name = "model", first.first_module or first.first_gradient or "loss"
    found.because = f"every row is bad, in plain torch as well: {_numbers(first)}"
    found.fix = (
        "the weights have gone too far: go on from an earlier checkpoint with a lower "
        "training.learning_rate"
    )


def describe(trial: Trial) -> str:
    """One line."""
    what = trial.what or "as it ran"
    if trial.problem:
        return f"{what}: not tried: {trial.problem}"
    return f"{what}: {'bad' if trial.is_bad else 'good'}: {_numbers(trial.outcome)}"


def _numbers(outcome: Outcome | None) -> str:
    if outcome is None:
        return "not tried"
    text = f"loss {outcome.loss:.4g}, grad_norm {outcome.grad_norm:.4g}"
    if outcome.first_module is not None:
        text += f"; the first output that is not finite is of {outcome.first_module}"
        text += f", whose inputs reach {outcome.largest_input:.3g}"
    elif outcome.first_gradient is not None:
        text += f"; the first gradient that is not finite is of {outcome.first_gradient}"
    return text
