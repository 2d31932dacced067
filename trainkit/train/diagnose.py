"""From a kept batch to the culprit: one thing changed at a time, until the step can be taken.

Every change is an override of the recipe, so what helps in the replay can be typed after
``--resume``.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn

from trainkit.checkpoint.whole.manifest import verify_directory
from trainkit.errors import RunDirectoryError, TrainkitError
from trainkit.models.fp8.decide import Fp8Setup
from trainkit.models.proof.compare import tensors_of
from trainkit.objectives.answers import REFERENCE
from trainkit.objectives.objective import LossSetup, Objective, Step, accepts_num_items
from trainkit.objectives.table import objective_of
from trainkit.options import Fp8Options
from trainkit.options.data import IGNORE_INDEX
from trainkit.recipe import Recipe, load_recipe
from trainkit.run import RunDirectory
from trainkit.run.files import read_json
from trainkit.run.starts import recorded_overrides, step_of
from trainkit.run.status import resume_command
from trainkit.train.faults.numbers import WEIGHTS, BadBatch, folder_of, read_batches, steps_kept
from trainkit.train.model import BuiltModel, build_model
from trainkit.train.saves import numbers_of
from trainkit.train.teacher import second_model

# A kept batch once more through a model, forth and back, watching where numbers stop being any.
#
# Shapes: B batch, S sequence.


@dataclass(frozen=True)
class MicroBatch:
    """Some rows, or documents of a packed row.

    Attributes:
        rows: their samples, ``file:line``.
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
        first_gradient: of the weights without a finite gradient, the one nearest to the loss.
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


def replay(setup: LossSetup, objective: Objective, batches: Sequence[MicroBatch]) -> Outcome:
    """The worst of some micro-batches: the first that is not finite, or of the largest loss."""
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
    seen: list[tuple[str, bool, float]] = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            del module
            largest = max(map(_largest, tensors_of((args, kwargs))), default=0.0)
            for tensor in tensors_of(output):
                seen.append((name, bool(tensor.isfinite().all()), largest))

        return hook

    with ExitStack() as hooks:
        for name, module in setup.model.named_modules():
            if name:
                hooks.enter_context(module.register_forward_hook(watch(name), with_kwargs=True))
        loss, norm, first_gradient = _forward_backward(setup, objective, batch)
    first, largest = next(
        ((name, into) for name, is_finite, into in seen if not is_finite), (None, None)
    )
    return Outcome(loss, norm, first, largest, first_gradient, batch.rows)


def _forward_backward(
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
    num_trained = int(torch.count_nonzero(inputs["labels"][..., 1:] != IGNORE_INDEX))
    num_items = torch.tensor(loss.num_items(inputs, num_trained), device=device)

    def plain(model: nn.Module, given: dict[str, Any], num: Any) -> tuple[Tensor, Any]:
        outputs = model(**given, **({"num_items_in_batch": num} if takes_num_items else {}))
        return outputs["loss"], outputs

    step = Step(num_items, 1, 1, trainer_divides=not takes_num_items, trainer_loss=plain)
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


def _largest(tensor: Tensor) -> float:
    finite = tensor.detach()[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def single_rows(batch: MicroBatch, together: int = 1) -> list[MicroBatch]:
    """Each row of a micro-batch by itself, or each document of a packed row."""
    values = batch.values
    ids = values.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or "pixel_values" in values:
        return []  # images are those of all rows
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
    found = []
    for first in range(0, len(spans), together):
        (rows, begin), (last, end) = spans[first], spans[min(first + together, len(spans)) - 1]
        span = slice(rows.start, last.stop), slice(begin.start, end.stop)
        alone = {
            key: value[span].clone()
            for key, value in values.items()
            if isinstance(value, Tensor) and value.shape == ids.shape
        }
        if (numbers := alone.get("answer_ids")) is not None:
            alone["answer_ids"] = torch.where(numbers < 0, numbers, numbers - first)
        if isinstance(said := values.get(REFERENCE), Tensor):
            alone[REFERENCE] = said[first : first + together]
        found.append(MicroBatch(batch.rows[first : first + together], alone))
    return found


def magnitudes(model: nn.Module) -> dict[str, float]:
    """How large the trained weights are on average, by name."""
    return {
        name: float(parameter.detach().float().abs().mean())
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.numel()
    }


@dataclass(frozen=True)
class Trial:
    """The batch with something changed.

    Attributes:
        outcome: None where the model could not be built or run so.
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
        are_the_steps: the weights are those that met the batch, not those of a checkpoint before.
        culprit: weights, learning_rate, kernel, attention, fp8, quantize, dtype, adapters, rows,
            model; None where the batch is not bad any more.
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
        return asdict(self)

    def blame(self, culprit: str, name: str, because: str, fix: str) -> None:
        """The culprit, and what to do about it."""
        self.culprit, self.name, self.because, self.fix = culprit, name, because, fix


def numbers(outcome: Outcome | None) -> str:
    if outcome is None:
        return "not tried"
    text = f"loss {outcome.loss:.4g}, grad_norm {outcome.grad_norm:.4g}"
    if outcome.first_module is not None:
        text += f"; the first output that is not finite is of {outcome.first_module}"
        text += f", whose inputs reach {outcome.largest_input:.3g}"
    elif outcome.first_gradient is not None:
        text += f"; the first gradient that is not finite is of {outcome.first_gradient}"
    return text


_FAR, _SMALL = 30.0, 0.01
"""How many times larger weights must have become to be taken for blown up, and what the smallest
count as: adapters begin at zero."""
_DEFAULT_RATE = 5e-5  # transformers'


class Bench:
    """Builds the run's model with overrides, replays the batch through it, and says what came."""

    def __init__(
        self,
        run: RunDirectory,
        kept: Sequence[BadBatch],
        weights: Path | None,
        found: Diagnosis,
        say: Callable[[str], None],
    ) -> None:
        self.run, self.weights, self.found, self._say = run, weights, found, say
        self.batches = micro_batches(kept)
        self.limit = kept[0].limit if kept[0].kind == "spike" else float("inf")
        self.record = read_json(run.kernels) or {}
        self._second: tuple[Any, BuiltModel | None] | None = None

    def recipe(self, overrides: Sequence[str] = ()) -> Recipe:
        run = self.run
        recorded = recorded_overrides(run)
        return load_recipe(run.recipe, overrides, bases=run.bases, recorded=recorded).recipe

    def build(self, recipe: Recipe, weights: Path | None) -> BuiltModel:
        """The model with weights of the run; None takes the base's."""
        source, adapters = recipe.model, None
        if recipe.lora is not None:
            adapters = weights
        elif weights is not None:
            source = source.replace(
                name_or_path=str(weights), revision=None, gguf_file=None, init="pretrained"
            )
        is_fp8_base = recipe.lora is not None and recipe.lora.quantize == "fp8"
        options = Fp8Options.of(recipe.model.fp8 or is_fp8_base)
        if source.attn_implementation == "auto":
            ran = self.record.get("attention", {}).get("name", "auto")
            source = source.replace(attn_implementation=ran)
        samples = [
            {key: batch.values[key] for key in ("input_ids", "labels")} for batch in self.batches
        ]
        fp8 = None if options is None else Fp8Setup(options, samples, 1, self.record.get("fp8"))
        return build_model(
            source,
            packing=recipe.data.packing,
            lora=recipe.lora,
            kernels=recipe.kernels,
            device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
            fp8=fp8,
            adapters_from=adapters,
            scalar_head=objective_of(recipe.objective).scalar_head,
            is_proved=False,
            sees_images=any("pixel_values" in batch.values for batch in self.batches),
        )

    def second(self, recipe: Recipe, device: torch.device) -> BuiltModel | None:
        """Of a teacher, or of the model before training: loaded again where it would be another."""
        decides = (
            recipe.model,
            recipe.distill,
            recipe.preference,
            recipe.kernels,
            recipe.data.packing,
        )
        if self._second is None or self._second[0] != decides:
            self._second = None  # two of them need not fit
            self._second = decides, second_model(recipe, device)
        return self._second[1]

    def trial(
        self,
        what: str,
        overrides: Sequence[str] = (),
        *,
        look: Callable[[BuiltModel], None] = lambda _: None,
        without_adapters: bool = False,
        batches: Sequence[MicroBatch] = (),
        weights: tuple[Path | None, ...] = (),
    ) -> Trial:
        """Replay with overrides, or other rows or weights; what cannot be built so says why."""
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        trial = Trial(what, tuple(overrides))
        try:
            recipe = self.recipe(overrides)
            built = self.build(recipe, *(weights or (self.weights,)))
            look(built)
            second = self.second(recipe, next(built.model.parameters()).device)
            setup = LossSetup(
                built.model,
                accepts_num_items(built.model),
                label_smoothing=float(recipe.training.get("label_smoothing_factor") or 0),
                preference=recipe.preference,
                distill=recipe.distill,
                eaft=recipe.eaft,
                teacher=None if second is None else second.model,
                router_aux_loss=recipe.model.router_aux_loss,
                router_z_loss=recipe.model.router_z_loss,
            )
            objective = objective_of(recipe.objective, recipe.distill)
            is_off = without_adapters and isinstance(built.model, PeftModel)
            with built.model.disable_adapter() if is_off else nullcontext():
                outcome = replay(setup, objective, batches or self.batches)
        except (TrainkitError, torch.OutOfMemoryError) as error:
            said = error.what if isinstance(error, TrainkitError) else "out of memory"
            trial = replace(trial, problem=said)
        else:
            trial = replace(trial, outcome=outcome, is_bad=outcome.is_bad(self.limit))
        if not batches or (trial.is_bad and not trial.problem):  # good rows are no news
            self.found.trials.append(trial)
            said = f"{'bad' if trial.is_bad else 'good'}: {numbers(trial.outcome)}"
            said = f"not tried: {trial.problem}" if trial.problem else said
            self._say(f"{what or 'as it ran'}: {said}")
        return trial

    def updates_blew_up(self, grown: Mapping[str, float]) -> bool:
        """Whether updates have blown the weights up, and the batch is good with those before them.

        Looked for first: with such weights any change of the order of sums may happen to help.
        What the last checkpoint holds may be blown up already.
        """
        last = _checkpoint_before(self.run, self.found.step)
        return any(self._blew_up_since(source, grown) for source in dict.fromkeys((last, None)))

    def _blew_up_since(self, source: Path | None, grown: Mapping[str, float]) -> bool:
        before: dict[str, float] = {}
        place = source.name if source else "the start"
        trial = self.trial(
            f"with the weights of {place}",
            look=lambda built: before.update(magnitudes(built.model)),
            weights=(source,),
        )
        ratios = {
            name: grown[name] / max(was, _SMALL) for name, was in before.items() if name in grown
        }
        farthest = max(ratios, key=lambda name: ratios[name], default=None)
        if trial.problem or trial.is_bad or farthest is None or ratios[farthest] < _FAR:
            return False
        recipe = self.recipe()
        rate = float(recipe.training.get("learning_rate") or _DEFAULT_RATE)
        usual = 1e-5 if recipe.lora is None else 1e-4
        lower = rate / 10 if rate < 1000 * usual else usual
        command = resume_command(self.run.root) if source else "begin again with"
        self.found.blame(
            "learning_rate",
            f"{rate:g}",
            f"the numbers of {farthest} are {grown[farthest]:.3g} on average, and were "
            f"{before[farthest]:.3g} in {place}, with whose weights the batch is good: "
            f"{numbers(trial.outcome)}",
            f"the updates are too large: {command} training.learning_rate={lower:g}",
        )
        return True

    def bisect(self, first: Outcome) -> None:
        """One change after the other; the first that helps names the culprit."""
        for kind, name, trial in self._changes():
            if trial.problem or trial.is_bad:
                continue
            fix = (
                "the trained adapters have grown too large: go on from the last checkpoint with a "
                "lower training.learning_rate"
            )
            if kind == "dtype":
                fix = (
                    "the numbers overflow what the dtype can hold: begin a new run with "
                    "model.dtype=float32 (or bfloat16 in place of float16), or a lower rate"
                )
            elif trial.overrides:
                fix = resume_command(self.run.root, *trial.overrides)
            because = f"as it ran: {numbers(first)}; {trial.what}: {numbers(trial.outcome)}"
            self.found.blame(kind, name, because, fix)
            return
        self._blame_rows(first)

    def _changes(self) -> Iterator[tuple[str, str, Trial]]:
        """Kind and name of what each trial leaves out, the cheapest and likeliest first."""
        recipe, trial = self.recipe(), self.trial
        if recipe.kernels:
            off = trial("without kernels", ["kernels=false"])
            if not off.is_bad:
                given = recipe.kernels if isinstance(recipe.kernels, dict) else {}
                kept_off = [key for key, on in given.items() if not on]
                for row in self.record.get("ops", []):
                    if row["status"] == "on":
                        op = row["op"]
                        text = ", ".join(f"{key}: false" for key in (*kept_off, op))
                        yield "kernel", op, trial(f"without {op}", [f"kernels={{{text}}}"])
                yield "kernel", "several", off
        if recipe.model.attn_implementation != "eager":
            name = str(self.record.get("attention", {}).get("name", "as chosen"))
            eager = ["model.attn_implementation=eager"]
            yield "attention", name, trial("eager attention", eager)
        no_fp8 = ["model.fp8=false"] if recipe.model.fp8 else []
        if no_fp8 and recipe.lora is None:
            yield "fp8", "products", trial("without fp8", no_fp8)
        if recipe.lora is not None and recipe.lora.quantize is not None:
            plain = ["lora.quantize=null"]
            plain += ["lora.quantize_skip=[]"] if recipe.lora.quantize_skip else []
            plain += ["lora.quantize_head=false"] if recipe.lora.quantize_head else []
            overrides = [*plain, *no_fp8]
            what = f"{recipe.lora.quantize} base"
            yield "quantize", what, trial("a base in its own dtype", overrides)
        if recipe.model.dtype != "float32":
            flags = [f"training.{k}=false" for k in ("fp16", "bf16") if recipe.training.get(k)]
            wide = ["model.dtype=float32", *flags]
            yield "dtype", str(recipe.model.dtype), trial("in float32", wide)
        if recipe.lora is not None:
            yield "adapters", "lora", trial("without adapters", without_adapters=True)

    def _blame_rows(self, first: Outcome) -> None:
        """Nothing that can be switched off helps: some rows, or the model whatever it reads."""
        together = objective_of(self.recipe().objective).num_together
        rows = [row for batch in self.batches for row in single_rows(batch, together)]
        trials = [self.trial(f"{row.rows[0]} alone", batches=[row]) for row in rows]
        bad = [trial.outcome for trial in trials if trial.is_bad and trial.outcome]
        if bad and len(bad) < len(rows):
            self.found.blame(
                "rows",
                ", ".join(outcome.rows[0] for outcome in bad),
                f"{len(bad)} of {len(rows)} rows are bad by themselves, in plain torch as well: "
                f"{numbers(bad[0])}",
                "look at them (trainkit data preview), correct them or take them out",
            )
            return
        self.found.blame(
            "model",
            first.first_module or first.first_gradient or "loss",
            f"{'every row' if rows else 'the step'} is bad, in plain torch as well: "
            f"{numbers(first)}",
            "the weights have gone too far: go on from an earlier checkpoint with a lower "
            "training.learning_rate",
        )


def diagnose(
    run: RunDirectory, step: int | None, say: Callable[[str], None] = lambda _: None
) -> Diagnosis:
    """Replay the batch of a bad step and name the culprit.

    Without a step it is the last whose batch was kept.
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
    # The step's own weights, else those of the last checkpoint before it, else the base's.
    weights: Path | None = folder_of(run.root, step) / WEIGHTS
    is_own = are_the_steps = folder_of(run.root, step).joinpath(WEIGHTS).is_dir()
    if is_own:
        verify_directory(folder_of(run.root, step) / WEIGHTS)
    else:
        weights = _checkpoint_before(run, step)
        are_the_steps = step == 1 if weights is None else step_of(weights) == step - 1
    found = Diagnosis(step, kept[0].says, str(weights or "the base model"), are_the_steps)
    bench = Bench(run, kept, weights, found, say)
    unsound: list[str] = []
    grown: dict[str, float] = {}

    def look(built: BuiltModel) -> None:
        tensors = numbers_of(built.model, None)
        unsound.extend(name for name, each in tensors if not bool(each.isfinite().all()))
        grown.update(magnitudes(built.model))

    first = bench.trial("", look=look)
    if first.problem or first.outcome is None:
        raise TrainkitError(
            f"the run's model cannot be built: {first.problem}", where=str(run.root)
        )
    if unsound:
        more = f" and {len(unsound) - 1} more" if len(unsound) > 1 else ""
        found.blame(
            "weights",
            unsound[0],
            f"{unsound[0]}{more}: NaN or infinite numbers in the weights themselves",
            f"an update before step {step} made them: go on from the last checkpoint with a lower "
            f"rate ({resume_command(run.root)} training.learning_rate=...), or, where the base "
            "model itself has them, load it again",
        )
    elif first.is_bad:
        if not (is_own and bench.updates_blew_up(grown)):
            bench.bisect(first.outcome)
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


def _checkpoint_before(run: RunDirectory, step: int) -> Path | None:
    before = [path for path in run.root.glob("checkpoint-*") if 0 <= step_of(path) < step]
    for path in sorted(before, key=step_of, reverse=True):
        if any(path.glob("*model*.safetensors")):
            verify_directory(path)
            return path
    return None
