"""From a kept batch to the culprit: one thing changed at a time, until the step can be taken.

Every change is an override of the recipe, so what helps in the replay can be typed after
``--resume``.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn

from trainkit.checkpoint.whole.manifest import verify_directory
from trainkit.errors import RunDirectoryError, TrainkitError
from trainkit.models.fp8.decide import Fp8Setup
from trainkit.objectives import OBJECTIVES
from trainkit.objectives.objective import LossSetup, Objective, Step, accepts_num_items
from trainkit.options import Fp8Options, PreferenceOptions
from trainkit.recipe import Recipe, load_recipe
from trainkit.run import RunDirectory
from trainkit.run.files import read_json
from trainkit.run.going_on import resume_command
from trainkit.run.starts import recorded_overrides, step_of
from trainkit.train.faults.numbers import (
    WEIGHTS,
    BadBatch,
    folder_of,
    read_batches,
    steps_kept,
)
from trainkit.train.model import BuiltModel, build_model
from trainkit.train.saves import numbers_of

# A kept batch once more through a model, forth and back, watching where numbers stop being any.
#
# Shapes: B batch, S sequence.


@dataclass(frozen=True)
class MicroBatch:
    """Some rows, or documents of a packed row.

    Attributes:
        rows: their samples, ``file:line``.
        values: what the model and the loss take.
    """

    rows: tuple[str, ...]
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What came of a replay.

    Attributes:
        loss: the mean over what is trained in the micro-batch; the largest, or one that is none.
        grad_norm: over all trained weights, of the same micro-batch.
        first_module: the first whose output is not finite, in the order of the forward pass.
        largest_input: the largest finite number that went into it.
        first_gradient: of the weights without a finite gradient, the one nearest to the loss.
        rows: of the micro-batch.
    """

    loss: float
    grad_norm: float
    first_module: str | None = None
    largest_input: float | None = None
    first_gradient: str | None = None
    rows: tuple[str, ...] = ()

    def is_bad(self, limit: float) -> bool:
        """Whether a step with it could not be taken; ``limit`` is that of a spike."""
        finite = abs(self.loss) < float("inf") and self.grad_norm < float("inf")
        return not finite or self.loss > limit

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def micro_batches(kept: Sequence[BadBatch]) -> list[MicroBatch]:
    """Those that were bad by themselves; all of the step where none was."""
    found = [
        (loss, MicroBatch(tuple(rows), {**extras, **tensors}))
        for each in kept
        for loss, rows, tensors, extras in zip(
            each.losses, each.rows, each.batches, each.extras, strict=True
        )
    ]
    bad = [batch for loss, batch in found if not abs(loss) < float("inf")]
    return bad or [batch for _, batch in found]


def replay(
    model: nn.Module,
    objective: Objective,
    batches: Sequence[MicroBatch],
    preference: PreferenceOptions | None = None,
) -> Outcome:
    """The worst of some micro-batches: the first that is not finite, else that of the largest loss.

    Args:
        model: on the device where it runs; its gradients are cleared.
        objective: whose loss is taken.
        batches: on any device.
        preference: of the recipe.
    """
    setup = LossSetup(model, accepts_num_items(model), preference=preference)
    worst: Outcome | None = None
    for batch in batches:
        found = _one(setup, objective, batch)
        if found.is_bad(float("inf")):
            return found
        if worst is None or found.loss > worst.loss:
            worst = found
    assert worst is not None
    return worst


def _one(setup: LossSetup, objective: Objective, batch: MicroBatch) -> Outcome:
    model = setup.model
    with _watching_outputs(model) as first_bad:
        loss, norm, first_gradient = _forth_and_back(setup, objective, batch)
        name = first_bad()
    found = Outcome(loss, norm, name, None, first_gradient, batch.rows)
    if name is None:
        return found
    with _watching_input(model.get_submodule(name)) as largest:
        _forth_and_back(setup, objective, batch)
        return replace(found, largest_input=largest())


def _forth_and_back(
    setup: LossSetup, objective: Objective, batch: MicroBatch
) -> tuple[float, float, str | None]:
    """Loss, norm of the gradient, and the weight nearest to the loss without a finite one."""
    torch.manual_seed(0)  # dropout
    model, takes_num_items = setup.model, setup.takes_num_items
    model.train()
    model.zero_grad()
    device = next(model.parameters()).device
    inputs = {
        key: value.to(device) if isinstance(value, Tensor) else value
        for key, value in batch.values.items()
    }
    loss = objective.loss(setup)
    num_trained = int(torch.count_nonzero(inputs["labels"][..., 1:] != -100))
    num_items = loss.num_items(inputs, num_trained)

    def plain(model: nn.Module, given: dict[str, Any], num: Any) -> tuple[Tensor, Any]:
        outputs = model(**given, **({"num_items_in_batch": num} if takes_num_items else {}))
        return outputs["loss"], outputs

    step = Step(
        num_items=torch.tensor(num_items, device=device),
        num_micro_batches=1,
        num_ranks=1,
        trainer_divides=not takes_num_items,
        trainer_loss=plain,
    )
    value, _ = loss.training(model, inputs, step)
    first_gradient, total = None, torch.zeros((), device=device, dtype=torch.float64)
    if value.requires_grad:
        value.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                norm = parameter.grad.double().norm()
                total = total + norm**2
                if not bool(norm.isfinite()):
                    first_gradient = name
    model.zero_grad()
    norm = float(total.sqrt())
    return float(value.detach()), norm if norm == norm else float("inf"), first_gradient


@contextmanager
def _watching_outputs(model: nn.Module) -> Iterator[Any]:
    """Within, a function that says which module's output was not finite first."""
    flags: list[tuple[str, Tensor]] = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            del module, inputs
            for tensor in _floats(output):
                flags.append((name, tensor.detach().isfinite().all()))

        return hook

    handles = [
        module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name
    ]

    def first_bad() -> str | None:
        return next((name for name, is_finite in flags if not bool(is_finite)), None)

    try:
        yield first_bad
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _watching_input(module: nn.Module) -> Iterator[Any]:
    """Within, a function that says the largest finite number that went into a module."""
    found = [0.0]

    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        del module
        for tensor in (*_floats(args), *_floats(list(kwargs.values()))):
            finite = tensor.detach()[tensor.isfinite()]
            if finite.numel():
                found.append(float(finite.abs().max()))

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield lambda: max(found)
    finally:
        handle.remove()


def _floats(value: Any) -> Iterator[Tensor]:
    """The tensors of numbers in an output."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _floats(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _floats(each)


def single_rows(batch: MicroBatch) -> list[MicroBatch]:
    """Each row of a micro-batch by itself, or each document of a packed row."""
    values = batch.values
    ids = values.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        return []
    if len(ids) == len(batch.rows):
        spans = [(slice(row, row + 1), slice(None)) for row in range(len(ids))]
    else:
        positions = values.get("position_ids")
        if len(ids) != 1 or not isinstance(positions, Tensor):
            return []
        starts = (positions[0] == 0).nonzero().flatten().tolist()[: len(batch.rows) + 1]
        ends = [*starts[1:], ids.shape[1]][: len(batch.rows)]
        if len(ends) != len(batch.rows):
            return []
        spans = [(slice(0, 1), slice(a, b)) for a, b in zip(starts, ends, strict=False)]
    return [
        MicroBatch(
            (name,),
            {
                key: value[span[: value.dim()]].clone()
                for key, value in values.items()
                if isinstance(value, Tensor) and value.shape == ids.shape
            },
        )
        for name, span in zip(batch.rows, spans, strict=True)
    ]


def magnitudes(model: nn.Module) -> dict[str, float]:
    """How large the trained weights are on average, by name."""
    return {
        name: float(parameter.detach().float().abs().mean())
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.numel()
    }


def unsound_weights(model: nn.Module) -> list[str]:
    """Weights that hold NaN or infinity, by name."""
    return [name for name, tensor in numbers_of(model, None) if not bool(tensor.isfinite().all())]


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


PLAIN = ("kernels=false", "model.attn_implementation=eager")
_FAR, _SMALL = 30.0, 0.01
"""How many times larger weights must have become to be taken for blown up, and what the smallest
count as: adapters begin at zero."""
_DEFAULT_RATE = 5e-5  # transformers'
_FP8 = {"fp8 base": "lora.quantize=null", "fp8 products": "model.fp8=false"}


@dataclass
class Diagnosis:
    """What was found.

    Attributes:
        step: whose batch it is.
        says: what the run said of it.
        weights: the directory that was loaded.
        are_the_steps: the weights are those that met the batch, not those of a checkpoint before.
        culprit: weights, learning_rate, kernel, attention, fp8, quantize, dtype, adapters, rows,
            model; None where the batch is not bad any more.
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
    is_own = weights is not None and weights.name == WEIGHTS
    bench = Bench(run, kept, weights)
    found = Diagnosis(step, kept[0].says, str(weights or "the base model"), are_the_steps)
    unsound: list[str] = []
    grown: dict[str, float] = {}

    def look(built: BuiltModel) -> None:
        unsound.extend(unsound_weights(built.model))
        grown.update(magnitudes(built.model))

    def tell(trial: Trial) -> Trial:
        found.trials.append(trial)
        say(describe(trial))
        return trial

    first = tell(bench.trial("", look=look))
    if first.problem:
        raise TrainkitError(
            f"the run's model cannot be built: {first.problem}", where=str(run.root)
        )
    if unsound:
        _blame_weights(found, unsound, run)
    elif first.is_bad:
        assert first.outcome is not None
        if not (is_own and _blame_rate(found, bench, grown, tell)):
            _bisect(found, bench, first.outcome, tell)
    else:
        found.because = "the batch is not bad here: " + numbers(first.outcome)
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
    path = _checkpoint_before(run, step)
    return path, step == 1 if path is None else step_of(path) == step - 1


def _checkpoint_before(run: RunDirectory, step: int) -> Path | None:
    before = [path for path in run.root.glob("checkpoint-*") if 0 <= step_of(path) < step]
    for path in sorted(before, key=step_of, reverse=True):
        if any(path.glob("*model*.safetensors")):
            verify_directory(path)
            return path
    return None


def _blame_rate(
    found: Diagnosis,
    bench: Bench,
    grown: Mapping[str, float],
    tell: Callable[[Trial], Trial],
) -> bool:
    """Whether updates have blown the weights up, and the batch is good with those before them.

    Looked for first: with such weights any change of the order of sums may happen to help.
    """
    last = _checkpoint_before(bench.run, found.step)
    # What the last checkpoint holds may be blown up already.
    return any(
        _blame_rate_since(source, found, bench, grown, tell)
        for source in dict.fromkeys((last, None))
    )


def _blame_rate_since(
    source: Path | None,
    found: Diagnosis,
    bench: Bench,
    grown: Mapping[str, float],
    tell: Callable[[Trial], Trial],
) -> bool:
    run = bench.run
    before: dict[str, float] = {}
    place = source.name if source else "the start"
    trial = tell(
        Bench(run, bench.kept, source).trial(
            f"with the weights of {place}",
            look=lambda built: before.update(magnitudes(built.model)),
        )
    )
    ratios = {name: grown[name] / max(was, _SMALL) for name, was in before.items() if name in grown}
    farthest = max(ratios, key=lambda name: ratios[name], default=None)
    if trial.problem or trial.is_bad or farthest is None or ratios[farthest] < _FAR:
        return False
    recipe = bench.recipe()
    rate = float(recipe.training.get("learning_rate") or _DEFAULT_RATE)
    usual = 1e-5 if recipe.lora is None else 1e-4
    lower = rate / 10 if rate < 1000 * usual else usual
    found.culprit, found.name = "learning_rate", f"{rate:g}"
    found.because = (
        f"the numbers of {farthest} are {grown[farthest]:.3g} on average, and were "
        f"{before[farthest]:.3g} in {place}, with whose weights the batch is good: "
        f"{numbers(trial.outcome)}"
    )
    command = resume_command(run.root) if source else "begin again with"
    found.fix = f"the updates are too large: {command} training.learning_rate={lower:g}"
    return True


def _blame_weights(found: Diagnosis, unsound: Sequence[str], run: RunDirectory) -> None:
    found.culprit, found.name = "weights", unsound[0]
    more = f" and {len(unsound) - 1} more" if len(unsound) > 1 else ""
    found.because = f"{unsound[0]}{more}: NaN or infinite numbers in the weights themselves"
    found.fix = (
        f"an update before step {found.step} made them: go on from the last checkpoint with a "
        f"lower rate ({resume_command(run.root)} training.learning_rate=...), or, where the "
        "base model itself has them, load it again"
    )


def _bisect(found: Diagnosis, bench: Bench, first: Outcome, tell: Callable[[Trial], Trial]) -> None:
    """One change after the other; the first that helps names the culprit."""
    for kind, name, trial in _changes(bench, tell):
        if trial.problem or trial.is_bad:
            continue
        found.culprit, found.name = kind, name
        found.because = f"as it ran: {numbers(first)}; {trial.what}: {numbers(trial.outcome)}"
        found.fix = (
            resume_command(bench.run.root, *trial.overrides)
            if trial.overrides
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
            f"{numbers(bad[0].outcome)}"
        )
        found.fix = "look at them (trainkit data preview), correct them or take them out"
        return
    found.culprit, found.name = "model", first.first_module or first.first_gradient or "loss"
    found.because = f"every row is bad, in plain torch as well: {numbers(first)}"
    found.fix = (
        "the weights have gone too far: go on from an earlier checkpoint with a lower "
        "training.learning_rate"
    )
