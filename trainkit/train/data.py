"""What a process trains on, and when: loaders of prepared and of streamed samples.

The order of an epoch belongs to the dataset and is a pure function of (seed, epoch), independent
of how many processes there are and of how a global batch is cut into micro-batches. So 1 x 8, 8 x 1
and 2 ranks x 4 train on the same samples in every step, and a resumed run counts to its place.

Every streamed batch carries the position behind it, so the position of the run is that of the last
batch it has trained on, however far the loading processes are ahead. Each rank saves its own next
to the weights. The ledger is cut back to its length at the checkpoint when a run goes on from
there, so it names each row once.

Sources shown in part make epochs unequal. Were the first epoch's number of micro-batches that of
all, a longer epoch would leave rows untrained, and a shorter one would end amid an optimizer step,
whose gradients would leak into the next.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info
from transformers import PreTrainedTokenizerBase, TrainingArguments

from trainkit.data.datasets import PreparedData, hold_out
from trainkit.data.files import read_rows, resolve_files
from trainkit.data.formats import decode_row, read_row
from trainkit.data.image_rows import has_images, located
from trainkit.data.messages import Conversation, RowError, validate
from trainkit.data.options import DataOptions
from trainkit.data.sources import Progress, prepare, sources_of
from trainkit.data.store import CHANGED, Entry, Ledger
from trainkit.data.summary import notes_of, refuse_unfit, source_notes, trained_and_evaluated
from trainkit.data.vision import NoVision, Vision, unstreamed
from trainkit.errors import CheckpointError, DataError, ModelError, TrainkitError
from trainkit.objectives.objective import (
    MAX_EMPTY,
    EpochDataset,
    Objective,
    RowShape,
    TrainingData,
)
from trainkit.objectives.sft import distinct_labels
from trainkit.objectives.table import refuse_unfit_feeding
from trainkit.options import ImageOptions, Source
from trainkit.parallel import Layout

if TYPE_CHECKING:
    from trainkit.data.streaming import Position, SampleStream


@dataclass
class EpochPlan:
    """The epochs of a run, counted as far as anybody asks.

    Attributes:
        accumulation: micro-batches per optimizer step.
    """

    count: Callable[[int], int]
    accumulation: int
    is_equal: bool = False
    max_steps: int = 0
    num_epochs: int = 0
    _counted: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, loader: Any, args: TrainingArguments, *, is_equal: bool = False) -> EpochPlan:
        """Ask the loader, and leave it at its first epoch; a stream is one epoch of all steps."""
        accumulation = args.gradient_accumulation_steps

        def count(epoch: int) -> int:
            if isinstance(loader, StreamLoader):
                return args.max_steps * accumulation
            loader.set_epoch(epoch)
            size = len(loader)
            loader.set_epoch(0)
            return size

        plan = cls(count, accumulation, is_equal)
        plan.max_steps = args.max_steps
        if args.max_steps <= 0:
            plan.max_steps = plan.steps_in(args.num_train_epochs)
        plan.num_epochs = plan.place_of(plan.max_steps - 1)[0] + 1
        return plan

    def num_batches(self, epoch: int) -> int:
        if self.is_equal:
            epoch = 0
        while len(self._counted) <= epoch:
            self._counted.append(self.count(len(self._counted)))
        return self._counted[epoch]

    def num_steps(self, epoch: int) -> int:
        """Optimizer steps of an epoch; the last one may have fewer micro-batches."""
        return -(-self.num_batches(epoch) // self.accumulation)

    def steps_in(self, num_epochs: float) -> int:
        """Optimizer steps of so many epochs; of a part of one, rounded up as transformers does."""
        if self.is_equal:
            return math.ceil(num_epochs * self.num_steps(0))
        whole = int(num_epochs)
        steps = sum(self.num_steps(epoch) for epoch in range(whole))
        rest = num_epochs - whole
        return steps + (math.ceil(rest * self.num_steps(whole)) if rest else 0)

    def place_of(self, step: int) -> tuple[int, int]:
        """The epoch that the step after ``step`` belongs to, and steps of it that are done."""
        epoch = num_empty = 0
        while step >= self.num_steps(epoch):
            num_empty = 0 if self.num_steps(epoch) else num_empty + 1
            if num_empty > MAX_EMPTY:
                raise DataError(
                    f"{MAX_EMPTY} epochs in a row have no row to train on",
                    where="data.train",
                    fix="raise the sources' epochs or weight",
                )
            step -= self.num_steps(epoch)
            epoch += 1
        return epoch, step


LENGTH_BLOCK = 400
"""``group_by_length`` sorts within blocks of so many samples, so that like lengths meet."""


class RankBatchSampler(Sampler[list[int]]):
    """The micro-batches of one process, as lists of places in the dataset's order.

    Micro-batch ``i`` of rank ``r`` holds the places from ``(i * world_size + r) * batch_size``.
    Every rank yields the same number of micro-batches: nothing is dropped and nothing is trained
    twice, places past the end are filled with ``~place`` (a negative number), which stands for "the
    sample at ``place`` with nothing trained".
    """

    def __init__(
        self,
        dataset: EpochDataset,
        *,
        batch_size: int,
        dist_rank: int,
        world_size: int,
        drop_last: bool = False,
        group_by_length: bool = False,
    ) -> None:
        self._dataset, self._batch_size = dataset, batch_size
        self._dist_rank, self._world_size = dist_rank, world_size
        self._drop_last, self._group_by_length = drop_last, group_by_length

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration follows."""
        self._dataset.set_epoch(epoch)

    def __len__(self) -> int:
        """Micro-batches of the chosen epoch; where sources are shown in part, epochs differ."""
        stride, num_samples = self._batch_size * self._world_size, len(self._dataset)
        return num_samples // stride if self._drop_last else -(-num_samples // stride)

    def __iter__(self) -> Iterator[list[int]]:
        order = np.arange(len(self._dataset))
        if self._group_by_length:
            lengths = self._dataset.lengths
            blocks = np.split(order, range(LENGTH_BLOCK, len(order), LENGTH_BLOCK))
            order = np.concatenate([b[np.argsort(-lengths[b], kind="stable")] for b in blocks])
        for index in range(len(self)):
            start = (index * self._world_size + self._dist_rank) * self._batch_size
            batch = [int(place) for place in order[start : start + self._batch_size]]
            # Ranks must agree on the number of micro-batches, not on their sizes: the last one may
            # be short, and a rank without any gets one row in which nothing is trained.
            yield batch or [~0]


@dataclass(frozen=True)
class FillingDataset(Dataset[Any]):
    """A map-style dataset that also answers the negative indices of :class:`RankBatchSampler`."""

    samples: EpochDataset
    without_training: Callable[[Any], Any]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        if index >= 0:
            return self.samples[index]
        return self.without_training(self.samples[~index])


class EpochDataLoader(DataLoader[Any]):
    """A DataLoader that passes the epoch on to its batch sampler, and can begin amid one."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration follows."""
        sampler = self.batch_sampler
        assert isinstance(sampler, RankBatchSampler)
        sampler.set_epoch(epoch)

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Any]:
        """The micro-batches of an epoch, without loading the first ``skip``."""
        self.set_epoch(epoch)
        if not skip or self.batch_sampler is None:
            return iter(self)
        rest = list(itertools.islice(self.batch_sampler, skip, None))
        kept = ("num_workers", "collate_fn", "pin_memory", "prefetch_factor", "generator")
        options = {name: getattr(self, name) for name in kept}
        return iter(DataLoader(self.dataset, batch_sampler=rest, **options))


NOTE = "stream"
"""The key of a `BatchNote` in a batch."""


@dataclass(frozen=True)
class BatchNote:
    """What a batch brings to the main process.

    Attributes:
        slot: the number of the loading process's shard.
    """

    slot: int
    position: Position
    entries: tuple[Entry, ...]
    num_rows: int
    num_dropped: int


class StreamState:
    """Where the stream of one rank is, and what became of its rows."""

    def __init__(
        self,
        stream: SampleStream,
        ledger: Path,
        *,
        num_slots: int,
        dist_rank: int,
        world_size: int,
        writes: bool = True,
    ) -> None:
        self.stream, self._writes = stream, writes
        self.dist_rank, self.world_size = dist_rank, world_size
        self.positions: list[Position | None] = [None] * num_slots
        self.next_slot = self.num_rows = self.num_dropped = 0
        mine = ledger if dist_rank == 0 else ledger.with_stem(f"{ledger.stem}.rank{dist_rank}")
        changed = mine.with_name(mine.name.replace(ledger.stem, Path(CHANGED).stem))
        self._files = (mine, changed)
        self._ledger = Ledger(mine, changed)

    def take(self, note: BatchNote) -> None:
        self.positions[note.slot] = note.position
        self.next_slot = (note.slot + 1) % len(self.positions)
        self.num_rows += note.num_rows
        self.num_dropped += note.num_dropped
        if note.entries and self._writes:
            for entry in note.entries:
                self._ledger.add(entry)
            self._ledger.flush()

    def save(self, directory: Path) -> None:
        """Write the file of this share of the rows into a checkpoint."""
        if not self._writes:
            return
        values = {
            "positions": [p.to_dict() if p else None for p in self.positions],
            "next_slot": self.next_slot,
            "num_rows": self.num_rows,
            "num_dropped": self.num_dropped,
            "ledger_bytes": [file.stat().st_size if file.exists() else 0 for file in self._files],
        }
        self._file(directory).write_text(json.dumps(values, indent=1), encoding="utf-8")

    def _file(self, directory: Path) -> Path:
        return directory / f"stream_rank{self.dist_rank}.json"

    def load(self, directory: Path) -> None:
        from trainkit.data.streaming import Position

        file = self._file(directory)
        if not file.exists():
            raise CheckpointError(
                "the checkpoint does not say where the stream was",
                where=str(directory),
                fix="continue with data.streaming and as many processes as the run had",
            )
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            positions = [Position.from_dict(p) if p else None for p in values["positions"]]
            counts = [int(values[key]) for key in ("next_slot", "num_rows", "num_dropped")]
            sizes = [int(size) for size in values["ledger_bytes"]]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(
                "the position of the stream is not one that this version of trainkit reads",
                where=str(file),
                fix="continue with the version that wrote it (environment.json names it), or "
                "begin a new run from the weights: "
                + shlex.join(["trainkit", "merge", str(directory), "DIR"]),
            ) from error
        if len(positions) != len(self.positions):
            raise CheckpointError(
                f"the run streamed with {len(positions)} loading processes a rank, and "
                f"not {len(self.positions)}",
                where=str(file),
                fix="set training.dataloader_num_workers to what it was",
            )
        self.positions = positions
        self.next_slot, self.num_rows, self.num_dropped = counts
        for ledger, size in zip(self._files, sizes, strict=True):
            if ledger.exists() and ledger.stat().st_size > size:
                with ledger.open("rb+") as stream:
                    stream.truncate(size)


class _Batches(IterableDataset[Any]):
    """The batches of one loading process; an error of ours comes as an item, with its message."""

    def __init__(
        self, state: StreamState, collate: Callable[[Sequence[Any]], dict[str, Any]], size: int
    ) -> None:
        self._state, self._collate, self._size = state, collate, size

    def __iter__(self) -> Iterator[dict[str, Any] | TrainkitError]:
        state = self._state
        worker = get_worker_info()
        num_slots = len(state.positions)
        # The loader asks process 0 first: it takes the slot whose turn it is.
        slot = (state.next_slot + (0 if worker is None else worker.id)) % num_slots
        rows = state.stream.rows(
            state.positions[slot],
            shard=state.dist_rank * num_slots + slot,
            num_shards=state.world_size * num_slots,
        )
        while True:
            try:
                taken = list(islice(rows, self._size))
            except TrainkitError as error:
                yield error
                return
            packed = state.stream.packing
            batch = self._collate([row.samples if packed else row.samples[0] for row in taken])
            batch[NOTE] = BatchNote(
                slot,
                taken[-1].position,
                tuple(entry for row in taken for entry in row.entries),
                sum(row.num_rows for row in taken),
                sum(row.num_dropped for row in taken),
            )
            yield batch


class StreamLoader(DataLoader[Any]):
    """Endless batches of a stream; what they say about it goes to its state."""

    def __init__(
        self,
        state: StreamState,
        collate: Callable[[Sequence[Any]], dict[str, Any]],
        args: TrainingArguments,
    ) -> None:
        batches = _Batches(state, collate, args.train_batch_size)
        super().__init__(batches, batch_size=None, **_loading(args))
        self._state = state

    def epoch(self, epoch: int, skip: int = 0) -> Any:
        """The batches from where the stream is: it knows itself what is done."""
        del epoch, skip
        return iter(self)

    def __iter__(self) -> Any:
        batches = super().__iter__()
        while True:
            try:
                batch = next(batches)
            except RuntimeError as error:
                if not str(error).startswith("DataLoader worker"):
                    raise
                raise DataError(
                    "a process that loads streamed data died, most likely because memory ran out",
                    where="training.dataloader_num_workers",
                    fix="fewer of them, or a smaller block: data.streaming: 1000",
                ) from error
            if isinstance(batch, TrainkitError):
                raise batch
            self._state.take(batch.pop(NOTE))
            yield batch


def sample_loader(
    data: TrainingData,
    args: TrainingArguments,
    layout: Layout,
    batch_size: int,
    *,
    drop_last: bool = False,
    group_by_length: bool = False,
) -> EpochDataLoader:
    """The micro-batches of this rank, in an order that only (seed, epoch) decide."""
    sampler = RankBatchSampler(
        data.samples,
        batch_size=batch_size,
        dist_rank=layout.data_rank,
        world_size=layout.data_size,
        drop_last=drop_last,
        group_by_length=group_by_length,
    )
    return EpochDataLoader(
        FillingDataset(data.samples, data.without_training),
        batch_sampler=sampler,
        collate_fn=data.collator,
        **_loading(args),
    )


def _loading(args: TrainingArguments) -> dict[str, Any]:
    """How loaders load. Workers are forked again for each epoch: they must see its order."""
    workers = args.dataloader_num_workers
    return {
        "num_workers": workers,
        "prefetch_factor": args.dataloader_prefetch_factor if workers > 0 else None,
        "pin_memory": args.dataloader_pin_memory and torch.cuda.is_available(),
        # Its own generator: iterating must not move the model's random numbers.
        "generator": torch.Generator().manual_seed(args.seed),
    }


def stream_state(data: TrainingData, args: TrainingArguments, layout: Layout) -> StreamState | None:
    """Where this rank's part of the stream is; None where nothing is streamed."""
    if data.stream is None:
        return None
    # The stream goes on from its own position; there is nothing to pass over.
    args.ignore_data_skip = True
    return StreamState(
        data.stream,
        Path(str(args.output_dir), "dropped.jsonl"),
        num_slots=max(args.dataloader_num_workers, 1),
        dist_rank=layout.data_rank,
        world_size=layout.data_size,
        writes=layout.counts_rows,
    )


class Batches(Protocol):
    """What the loop takes its micro-batches from."""

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[dict[str, Any]]:
        """Those of an epoch, without the first ``skip``."""


def train_loader(
    data: TrainingData, stream: StreamState | None, args: TrainingArguments, layout: Layout
) -> Batches:
    """The micro-batches of this rank, in an order that only (seed, epoch) decide."""
    if stream is not None:
        return StreamLoader(stream, data.collator, args)
    return sample_loader(
        data,
        args,
        layout,
        args.train_batch_size,
        drop_last=args.dataloader_drop_last,
        group_by_length=args.train_sampling_strategy == "group_by_length",
    )


# From the recipe's data section to what the loop reads: datasets, collators, counts.


@dataclass(frozen=True)
class RunData:
    """The data of one run.

    Attributes:
        eval: what ``eval_loss`` is measured on, or None.
        summary: the content of ``data.json``.
        ledger: the file with a line for every row that was dropped, cut or repaired; None if none.
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
    def num_images(self) -> int:
        parts = [part or {} for part in self.summary.values()]
        return sum((part.get("totals") or {}).get("images", 0) for part in parts)

    @property
    def headline(self) -> str:
        totals, held_out = self.summary["train"].get("totals"), self.summary["eval"]
        if totals is None:
            sizes = [row["bytes"] for row in self.summary["train"]["files"]]
            line = f"data: {len(sizes)} files of {sum(sizes) / 2**30:.2f} GiB, streamed"
        else:
            line = (
                f"data: {totals['samples']} samples, {totals['tokens']} tokens, "
                f"{totals['trained_tokens']} of them trained; {totals['dropped']} rows dropped, "
                f"{totals['cut']} cut"
            )
        if totals is not None and totals.get("images"):
            line += f"\n{totals['images']} images in {totals['image_tokens']} of the tokens"
        if not held_out:
            return line
        totals = held_out["totals"]
        return (
            f"{line}\nevaluation data: {totals['samples']} samples, {totals['trained_tokens']} "
            f"trained tokens; {totals['dropped']} rows dropped, {totals['cut']} cut"
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
    stream_buffer: int = 0,  # samples in a block of a stream; 0 prepares all
    num_shards: int = 1,
    row_parts: int = 1,
    held_out: int | float | None = None,  # a share below 1, or a number of conversations
    vision: Vision | NoVision | None = None,
    shares_prompts: bool = False,
) -> RunData:
    """Read, mask and tokenise before there is a process group; unfit rows raise TrainkitError."""
    feeding = {"packing": packing, "streaming": bool(stream_buffer)}
    refuse_unfit_feeding(objective, **feeding, splits_rows=row_parts > 1)
    fit = partial(sources_of, objective.name, objective.format)
    train, evaluation = fit(train), fit(evaluation)
    pad_token_id = _padding(tokenizer, options.num_embeddings)
    book = Ledger(ledger)
    kept_back: PreparedData | None = None
    seen = set[bytes]()
    trained: PreparedData | Mapping[str, Any]
    prepared = partial(prepare, tokenizer=tokenizer, options=options, ledger=book, vision=vision)

    def shape(length: int, names: Sequence[str]) -> RowShape:
        wanted = len(names) > 1 if per_source_loss is None else per_source_loss
        found = distinct_labels(names) if wanted else ()
        return RowShape(length, pad_token_id, packing, found, row_parts, vision, shares_prompts)

    def batches(data: PreparedData, seed: int | None) -> TrainingData:
        rows = shape(_row_length(data, options, objective, row_parts), data.source_names)
        made = objective.training_data(objective.dataset(data, rows, seed), rows)
        return replace(made, sample_name=data.sample_id, has_equal_epochs=data.has_equal_epochs)

    if stream_buffer:
        from trainkit.data.streaming import SampleStream, first_look

        stream = SampleStream(
            train, tokenizer, options, packing=packing, shuffle=shuffle, buffer=stream_buffer
        )
        stream.builder.no_vision = unstreamed(vision)  # its samples have none
        samples, summary, parts = first_look(stream, tokenizer, num_shards=num_shards)
        trained = summary
        rows = shape(options.max_length, [source.label for source in stream.sources])
        training = objective.training_data(samples, rows, stream)
        notes = [note for source in summary["sources"] for note in source_notes(source)]
    else:
        data = prepared(train, progress=progress, seen=seen)
        if held_out is not None:
            data, kept_back = hold_out(data, held_out)
        training = batches(data, options.seed if shuffle else None)
        trained, summary = data, data.summary
        notes = notes_of(summary, "training data")
        parts = parts_of(data, packing=packing, shuffle=shuffle)
    refuse_unfit(summary)
    if evaluation:
        kept_back = prepared(evaluation, is_evaluation=True, progress=progress, seen=seen)
        held = kept_back.summary
        notes += [*notes_of(held, "evaluation data"), *held["listed_twice"]]
    book.close()
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
        warnings=(*summary["warnings"], *trained_and_evaluated(trained, kept_back)),
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


def read_conversations(
    sources: Sequence[Source],
    ledger: Path,
    vision: Vision | NoVision | None = None,
    options: ImageOptions | None = None,
    *,
    most: int | None = None,
) -> tuple[list[Conversation], int]:
    """Whole conversations with their tools and images, for questions to a trained model.

    Returns:
        The conversations, ``most`` of them, and how many rows until then are none, or have an image
        that cannot be read.
    """
    entries = Ledger(ledger)
    why = ""

    def drop(file: Path, line: int, error: RowError) -> None:
        nonlocal why
        why = why or f"{file}:{line}: {error.detail}"
        entries.add(Entry(str(file), line, "dropped", error.reason, error.detail))

    options = options or ImageOptions()
    found = (conversations_in(source, vision, options, drop) for source in sources)
    conversations = list(islice(chain.from_iterable(found), most))
    entries.close()
    if sources and not conversations:
        raise DataError(
            "there is no conversation to ask questions from" + (f": {why}" if why else ""),
            where=f"generation_eval.data: {sources[0].path}",
            fix="give files with conversations in the messages format",
        )
    return conversations, entries.num("dropped")


def conversations_in(
    source: Source,
    vision: Vision | NoVision | None,
    options: ImageOptions,
    drop: Callable[[Path, int, RowError], None],
) -> Iterator[Conversation]:
    """The conversations of a source; ``drop`` gets file, line and reason of every other row."""
    folder = [] if options.folder is None else [Path(options.folder).absolute()]
    for file in resolve_files(source.path):
        for row in read_rows(file):
            try:
                content = decode_row(row)
                if isinstance(vision, NoVision) and has_images(content):
                    raise vision.error(f"{file}:{row.line}")
                sees = isinstance(vision, Vision)
                parsed = read_row(content, source.format, source.columns, images=sees)
                if not isinstance(parsed, Conversation):
                    raise RowError("no_messages", "the row is not a conversation")
                parsed = located(parsed, file.absolute().parent, *folder)
                if isinstance(vision, Vision):
                    vision.load_all(parsed, Path(), options)
                yield validate(parsed, needs_assistant=True)
            except RowError as error:
                drop(file, row.line, error)


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
        **({"images": images_of(data)} if data.num_images else {}),
    }


def images_of(data: PreparedData) -> list[str]:
    stored = [part.store.images for part in data.parts]
    digests = (images.images[:, 3].tobytes() for images in stored if images is not None)
    return [data.summary["vision"], hashlib.sha256(b"".join(digests)).hexdigest()[:16]]


def fingerprint_of(parts: Mapping[str, Any]) -> str:
    """A digest of what decides the samples, without the names of files: the same data may move."""
    parts = {**parts, "files": [row[:3] for row in parts["files"]]}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


ALIGNED = 64
"""Shorter packed rows are padded to a multiple of so many tokens."""


def _row_length(
    data: PreparedData, options: DataOptions, objective: Objective, row_parts: int
) -> int:
    """Tokens of a packed row: no more than an epoch could ever fill, however large the limit."""
    num_samples = sum(len(part) * math.ceil(part.share.epochs) for part in data.parts)
    most = num_samples * int(data.lengths.max(initial=1))
    aligned = math.lcm(ALIGNED, row_parts)
    return min(options.max_length * objective.num_together, -(-most // aligned) * aligned)
