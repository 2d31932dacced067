"""What a start leaves in the run directory before its first step."""

import dataclasses
import itertools
from typing import Any

from transformers import PreTrainedTokenizerBase, TrainingArguments

from trainkit.models.attention import Attention
from trainkit.options.data import IGNORE_INDEX
from trainkit.parallel import Machine
from trainkit.recipe import Derived, LoadedRecipe, dump_resolved
from trainkit.recipe.document import RECORD
from trainkit.redact import redact_text
from trainkit.run import RunDirectory, capture_environment, command_script
from trainkit.run.report import SAMPLES
from trainkit.run.starts import Start, append_start, retire_after
from trainkit.train.data import RunData
from trainkit.train.prepare import settled_values
from trainkit.train.run import Run

_MAX_SAMPLES, _MAX_TOKENS = 4, 1200
"""That a report shows."""


def write_record(run: Run) -> None:
    """What is known before a run is built: recipe, command, environment, data."""
    directory, data = run.directory, run.data
    # The recipe alone is not what was given.
    append_start(directory, Start(overrides=run.options.overrides))
    _write_recipe(directory, run.loaded)
    directory.write_text(directory.resolved, dump_resolved(run.loaded, run.machine).join(RECORD))
    directory.write_text(directory.command, command_script())
    directory.write_json(directory.environment, capture_environment())
    directory.write_json(directory.data, data.summary)
    directory.write_json(directory.root / SAMPLES, shown_samples(data, run.tokenizer))
    for target in (directory.dropped, directory.changed):
        entries = data.ledger.with_name(target.name)
        if entries.exists():
            directory.write_text(target, entries.read_text(encoding="utf-8"))


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


def write_start(run: Run) -> None:
    """What is known when the first step is about to be taken: the values that the run uses.

    A continued run also retires the checkpoints after the one it continues from, and adds a line
    to ``changes.jsonl``.
    """
    directory, loaded, point = run.directory, run.loaded, run.point
    if point is not None:
        former = None
        if directory.recipe.is_file():
            text = directory.recipe.read_text(encoding="utf-8")
            former = None if text == redact_text(loaded.source_text) else text
        start = Start(
            step=point.step,
            overrides=run.options.overrides,
            changes=tuple(change.to_dict() for change in run.review.changes),
            accepted=tuple(change.to_dict() for change in run.review.accepted),
            retired=retire_after(directory, point.step),
            former_recipe=former,
        )
        append_start(directory, start)
        if former is not None:
            _write_recipe(directory, loaded)
        loaded = _labelled(loaded, f"override at step {point.step}")
    found = settled(loaded, run.machine, run.args, run.built.attention)
    text = dump_resolved(loaded, run.machine, settled=found)
    directory.write_text(directory.resolved, text.join(RECORD))


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
