"""From the recipe's data section to what the loop reads: datasets, collators, counts."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from trainkit.data.build.datasets import PreparedData, hold_out
from trainkit.data.build.ledger import Entry, Ledger
from trainkit.data.build.prepare import Progress, prepare
from trainkit.data.build.summary import files_in_both, notes_of, source_notes
from trainkit.data.look.check import refuse_unfit
from trainkit.data.options import DataOptions
from trainkit.data.read.finding import resolve_files
from trainkit.data.read.formats import decode_row, read_row
from trainkit.data.read.messages import Conversation, RowError, validate
from trainkit.data.read.reading import RawRow, read_rows
from trainkit.data.serve.streaming import SampleStream, first_look
from trainkit.errors import DataError, ModelError
from trainkit.objectives.batches import TrainingData
from trainkit.objectives.objective import Objective, RowShape
from trainkit.objectives.source_loss import distinct_labels
from trainkit.objectives.table import refuse_unfit_feeding, sources_of
from trainkit.options import Source


@dataclass(frozen=True)
class RunData:
    """The data of one run.

    Attributes:
        objective: what is optimised.
        train: what is trained on.
        eval: what ``eval_loss`` is measured on, or None.
        summary: the content of ``data.json``.
        ledger: the file with a line for every row that was dropped, cut or repaired; None if none.
        stop_token_ids: the end-of-turn tokens that are trained.
        fingerprint: the same for the same samples.
        parts: what it is made of, to tell what has changed.
        notes: rows that are dropped, by reason; fields and files that are not used.
        warnings: what the user should know before training.
    """

    objective: Objective
    train: TrainingData
    eval: TrainingData | None
    summary: Mapping[str, Any]
    ledger: Path
    stop_token_ids: tuple[int, ...]
    fingerprint: str
    parts: Mapping[str, Any]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def headline(self) -> str:
        """What there is to train on, in a line."""
        totals = self.summary["train"].get("totals")
        if totals is None:
            sizes = [row["bytes"] for row in self.summary["train"]["files"]]
            return (
                f"data: {len(sizes)} files of {sum(sizes) / 2**30:.2f} GiB, streamed"
                + self._held_out()
            )
        return (
            f"data: {totals['samples']} samples, {totals['tokens']} tokens, "
            f"{totals['trained_tokens']} of them trained; {totals['dropped']} rows dropped, "
            f"{totals['cut']} cut"
        ) + self._held_out()

    def _held_out(self) -> str:
        if not self.summary["eval"]:
            return ""
        totals = self.summary["eval"]["totals"]
        return (
            f"\nevaluation data: {totals['samples']} samples, {totals['trained_tokens']} trained "
            f"tokens; {totals['dropped']} rows dropped, {totals['cut']} cut"
        )


def prepare_run_data(
    train: Sequence[Source],
    evaluation: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    options: DataOptions,
    *,
    ledger: Path,
    progress: Callable[[Progress], None] | None,
    objective: Objective,
    packing: bool,
    shuffle: bool = True,
    per_source_loss: bool | None = None,
    stream_buffer: int = 0,
    num_shards: int = 1,
    row_parts: int = 1,
    held_out: int | float | None = None,
) -> RunData:
    """Read, mask and tokenise; call it before there is a process group.

    Rows that cannot be trained on raise a TrainkitError. A stream has ``stream_buffer`` samples in
    a block, and 0 prepares all; ``held_out`` is a share below 1, or a number of conversations.
    """
    refuse_unfit_feeding(
        objective, packing=packing, streaming=bool(stream_buffer), splits_rows=row_parts > 1
    )
    train, evaluation = sources_of(objective, train), sources_of(objective, evaluation)
    pad_token_id = _padding(tokenizer, options.num_embeddings)
    entries = Ledger(ledger)
    kept_back: PreparedData | None = None

    def prepared(sources: Sequence[Source]) -> PreparedData:
        return prepare(sources, tokenizer, options, ledger=entries, progress=progress)

    def shape(length: int, names: Sequence[str]) -> RowShape:
        wanted = len(names) > 1 if per_source_loss is None else per_source_loss
        found = distinct_labels(names) if wanted else ()
        return RowShape(length, pad_token_id, packing, found, row_parts)

    def batches(data: PreparedData, seed: int | None) -> TrainingData:
        longest = options.max_length * objective.num_together
        rows = shape(_row_length(data, longest, row_parts), data.source_names)
        made = objective.training_data(objective.dataset(data, rows, seed), rows)
        return replace(made, sample_name=data.sample_id, has_equal_epochs=data.has_equal_epochs)

    if stream_buffer:
        stream = SampleStream(
            train, tokenizer, options, packing=packing, shuffle=shuffle, buffer=stream_buffer
        )
        samples, summary, parts = first_look(stream, tokenizer, num_shards=num_shards)
        rows = shape(options.max_length, [source.label for source in stream.sources])
        training = objective.training_data(samples, rows, stream)
        notes = [note for source in summary["sources"] for note in source_notes(source)]
    else:
        data = prepared(train)
        if held_out is not None:
            data, kept_back = hold_out(data, held_out)
        training = batches(data, options.seed if shuffle else None)
        summary = data.summary
        notes = notes_of(summary, "training data")
        parts = parts_of(data, packing=packing, shuffle=shuffle)
    refuse_unfit(summary)
    if evaluation:
        kept_back = prepared(evaluation)
        about = kept_back.summary
        notes += [*notes_of(about, "evaluation data"), *about["listed_twice"]]
    entries.close()
    evaluated = kept_back.summary if kept_back else None
    return RunData(
        objective=objective,
        train=training,
        eval=None if kept_back is None else batches(kept_back, None),
        summary={"train": summary, "eval": evaluated},
        ledger=ledger,
        stop_token_ids=tuple(sorted(summary["end_of_turn"].values())),
        fingerprint=fingerprint_of(parts),
        parts=parts,
        notes=tuple(notes),
        warnings=(*summary["warnings"], *files_in_both(summary, evaluated)),
    )


def _padding(tokenizer: PreTrainedTokenizerBase, num_embeddings: int | None) -> int:
    pad_token_id = tokenizer.pad_token_id
    if pad_token_id is None:
        pad_token_id = tokenizer.eos_token_id
    if pad_token_id is None:
        raise ModelError(
            "the tokenizer has neither a padding nor an end-of-sequence token",
            where="model.name_or_path",
            fix="set pad_token in its tokenizer_config.json",
        )
    if num_embeddings is not None and pad_token_id >= num_embeddings:
        raise ModelError(
            f"the padding token {tokenizer.pad_token!r} has the id {pad_token_id}, and the model's "
            f"embedding has {num_embeddings} rows",
            where="model.name_or_path",
            fix="set pad_token in tokenizer_config.json to a token that the model has, or grow the "
            "model: model.resize_token_embeddings(len(tokenizer)), then save both",
        )
    return int(pad_token_id)


def read_conversations(sources: Sequence[Source], ledger: Path) -> tuple[list[Conversation], int]:
    """Whole conversations with their tools, for questions to a trained model.

    Args:
        sources: where they are.
        ledger: gets a line for every row that is not a conversation.

    Returns:
        The conversations, and how many rows are none.

    Raises:
        DataError: there is not one.
    """
    entries = Ledger(ledger)
    conversations = []
    for source in sources:
        for file in resolve_files(source.path):
            for row in read_rows(file, max_row_bytes=DataOptions().max_row_bytes):
                try:
                    conversations.append(_conversation(row, source))
                except RowError as error:
                    entries.add(Entry(str(file), row.line, "dropped", error.reason, error.detail))
    entries.close()
    if sources and not conversations:
        raise DataError(
            "there is no conversation to ask questions from",
            where=f"generation_eval.data: {sources[0].path}",
            fix="give files with conversations in the messages format",
        )
    return conversations, entries.num("dropped")


def _conversation(row: RawRow, source: Source) -> Conversation:
    parsed = read_row(decode_row(row), source.format, source.columns)
    if not isinstance(parsed, Conversation):
        raise RowError("no_messages", "the row is not a conversation")
    return validate(parsed, needs_assistant=True)


def parts_of(data: PreparedData, *, packing: bool, shuffle: bool) -> dict[str, Any]:
    """Everything that decides which tokens a step trains on: digests, counts and options."""
    summary = data.summary
    mixture = [(row["weight"], row["epochs"]) for row in summary["sources"]]
    streams = [part.share.name for part in data.parts]
    is_plain = all(share == (None, 1) for share in mixture)
    return {
        "files": [
            (row["sha256"], row["samples"], row["tokens"], row["path"]) for row in summary["files"]
        ],
        "mixture": mixture,
        "template": summary["template_sha256"],
        "tokenizer": summary["tokenizer_sha256"],
        "max_length": summary["options"]["max_length"],
        "mask": summary["options"]["mask"],
        "packing": packing,
        "shuffle": shuffle,
        **({"held_out": summary["held_out"]["digest"]} if "held_out" in summary else {}),
        # Runs of older versions drew by labels alone, and knew no mixture in the files' order.
        **({"streams": streams} if streams != [part.name for part in data.parts] else {}),
        **({} if shuffle or is_plain else {"mixed_in_order": True}),
    }


def fingerprint_of(parts: Mapping[str, Any]) -> str:
    """A digest of what decides the samples, without the names of files: the same data may move."""
    parts = {**parts, "files": [row[:3] for row in parts["files"]]}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


ALIGNED = 64
"""Shorter packed rows are padded to a multiple of so many tokens."""


def _row_length(data: PreparedData, max_length: int, row_parts: int) -> int:
    """Tokens of a packed row: no more than an epoch could ever fill, however large the limit."""
    num_samples = sum(len(part) * math.ceil(part.share.epochs) for part in data.parts)
    most = num_samples * int(data.lengths.max(initial=1))
    aligned = math.lcm(ALIGNED, row_parts)
    return min(max_length, -(-most // aligned) * aligned)
