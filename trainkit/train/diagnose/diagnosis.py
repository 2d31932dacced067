"""From a kept batch to the culprit: one thing changed at a time, until the step can be taken.

Every change is an override of the recipe, so what helps in the replay can be typed after
``--resume``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainkit.checkpoint.whole.manifest import verify_directory
from trainkit.errors import RunDirectoryError, TrainkitError
from trainkit.recipe import Recipe
from trainkit.run import RunDirectory
from trainkit.run.files import read_json
from trainkit.run.going_on import resume_command
from trainkit.run.starts import step_of
from trainkit.train.diagnose.replay import (
    Outcome,
    magnitudes,
    single_rows,
    unsound_weights,
)
from trainkit.train.diagnose.trials import Bench, Trial, describe, numbers
from trainkit.train.faults.bad_batch import (
    WEIGHTS,
    folder_of,
    read_batches,
    steps_kept,
)
from trainkit.train.model import BuiltModel

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
