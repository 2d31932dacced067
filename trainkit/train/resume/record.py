"""What a start leaves in the run directory before its first step."""

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase, TrainingArguments

from trainkit.models.attention import Attention
from trainkit.models.loss.loss_head import IGNORE_INDEX
from trainkit.parallel import Machine
from trainkit.recipe import Derived, LoadedRecipe, SftOptions, dump_resolved
from trainkit.redact import redact_text
from trainkit.run import RunDirectory, capture_environment, command_script
from trainkit.run.report.html import SAMPLES
from trainkit.run.starts import Start, append_start, retire_after
from trainkit.train.arguments import settled_values
from trainkit.train.checkpoints import ResumePoint
from trainkit.train.data.run_data import RunData
from trainkit.train.resume.changes import Review

_MAX_SAMPLES, _MAX_TOKENS = 4, 1200
"""That a report shows."""


@dataclass(frozen=True)
class Resumption:
    """Where a start begins.

    Attributes:
        fingerprint: data, processes and versions of this start.
        point: the checkpoint it continues from; None begins at step 0.
        review: what is not as it was there.
    """

    fingerprint: Mapping[str, Any]
    point: ResumePoint | None = None
    review: Review = field(default_factory=Review)


def write_record(
    run: RunDirectory,
    loaded: LoadedRecipe,
    data: RunData,
    tokenizer: PreTrainedTokenizerBase,
    options: SftOptions,
    machine: Machine,
) -> None:
    """What is known before a run is built: recipe, command, environment, data."""
    append_start(run, Start(overrides=options.overrides))  # the recipe alone is not what was given
    _write_recipe(run, loaded)
    run.write_text(run.resolved, dump_resolved(loaded, machine))
    run.write_text(run.command, command_script())
    run.write_json(run.environment, capture_environment())
    run.write_json(run.data, data.summary)
    run.write_json(run.root / SAMPLES, shown_samples(data, tokenizer))
    for target in (run.dropped, run.changed):
        entries = data.ledger.with_name(target.name)
        if entries.exists():
            run.write_text(target, entries.read_text(encoding="utf-8"))


def shown_samples(data: RunData, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The first training samples with their masks, for the report; see `report.SAMPLES`."""
    samples = []
    for sample in itertools.islice(data.train.first_samples(), _MAX_SAMPLES):
        trained = (sample["labels"][0] != IGNORE_INDEX).tolist()
        ids = sample["input_ids"][0].tolist()
        pairs = zip(trained[:_MAX_TOKENS], ids[:_MAX_TOKENS], strict=True)
        pieces = [
            (is_trained, tokenizer.decode([token for _, token in group]))
            for is_trained, group in itertools.groupby(pairs, key=lambda pair: pair[0])
        ]
        samples.append(
            {
                "pieces": pieces,
                "num_tokens": len(ids),
                "num_trained_tokens": sum(trained),
                "is_cut": len(ids) > _MAX_TOKENS,
            }
        )
    return {"samples": samples}


def write_start(
    run: RunDirectory,
    loaded: LoadedRecipe,
    options: SftOptions,
    machine: Machine,
    resumption: Resumption,
    args: TrainingArguments,
    attention: Attention,
) -> None:
    """What is known when the first step is about to be taken: the values that the run uses.

    A continued run also retires the checkpoints after the one it continues from, and adds a line
    to ``changes.jsonl``.
    """
    point = resumption.point
    if point is not None:
        former = None
        if run.recipe.is_file():
            text = run.recipe.read_text(encoding="utf-8")
            former = None if text == redact_text(loaded.source_text) else text
        review = resumption.review
        start = Start(
            step=point.step,
            overrides=options.overrides,
            changes=tuple(change.to_dict() for change in review.changes),
            accepted=tuple(change.to_dict() for change in review.accepted),
            retired=retire_after(run, point.step),
            former_recipe=former,
        )
        append_start(run, start)
        if former is not None:
            _write_recipe(run, loaded)
        loaded = _labelled(loaded, f"override at step {point.step}")
    text = dump_resolved(loaded, machine, settled=settled(loaded, machine, args, attention))
    run.write_text(run.resolved, text)


def settled(
    loaded: LoadedRecipe, machine: Machine, args: TrainingArguments, attention: Attention
) -> dict[str, Derived]:
    """Values that only the built run knows, by dotted key."""
    prefix = "training."
    shown = {
        value.key.removeprefix(prefix): value.value
        for value in loaded.values(machine)
        if value.key.startswith(prefix)
    }
    found = {f"{prefix}{key}": value for key, value in settled_values(args, shown).items()}
    if loaded.recipe.model.attn_implementation == "auto":
        origin = f"from auto: {' '.join(attention.reason.split())}"
        found["model.attn_implementation"] = Derived(attention.name, origin, is_of_machine=True)
    return found


def _write_recipe(run: RunDirectory, loaded: LoadedRecipe) -> None:
    for path in run.bases:
        path.unlink()
    for number, text in enumerate(loaded.base_texts):
        run.write_text(run.base(number), text)
    run.write_text(run.recipe, loaded.source_text)


def _labelled(loaded: LoadedRecipe, label: str) -> LoadedRecipe:
    """The recipe with today's overrides named as those of a later step."""
    origins = {
        key: label if where == "override" else where for key, where in loaded.origins.items()
    }
    return dataclasses.replace(loaded, origins=origins)
