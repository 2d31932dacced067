"""A second model: the teacher of a distillation, or the model before training, live.

What a teacher has said may be in the rows instead; and the answers that it is asked of may be drawn
while the student trains.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainkit.checkpoint.weights.contents import taking_up
from trainkit.data.datasets import PreparedData
from trainkit.data.fields import teacher_of
from trainkit.data.files import read_rows
from trainkit.data.formats import decode_row
from trainkit.data.messages import RowError
from trainkit.errors import DataError, ModelError
from trainkit.models.generation import draw_rows
from trainkit.models.tokenizer import check_exists, load_config, load_tokenizer
from trainkit.objectives.distill import DRAWN_FIGURES, ToldDataset
from trainkit.objectives.objective import TrainingData
from trainkit.options import DistillOptions, ModelOptions
from trainkit.options.training import OnPolicyOptions
from trainkit.recipe import Recipe
from trainkit.train.data import train_loader
from trainkit.train.evaluations import marking, undisturbed
from trainkit.train.fit import context_warning
from trainkit.train.hooks import Hook, LoopState
from trainkit.train.model import BuiltModel, build_model

if TYPE_CHECKING:
    from trainkit.train.checkpoints import Save


def second_model(recipe: Recipe, device: torch.device) -> BuiltModel | None:
    """The frozen model that the loss asks at each step; None where it asks none."""
    if recipe.distill is not None and recipe.distill.teacher is not None:
        with _of_teacher():
            return _frozen(recipe, _source_of_teacher(recipe, recipe.distill), device)
    source = recipe.model.replace(frozen=[])
    return _frozen(recipe, source, device) if recipe.asks_reference == "second model" else None


def _source_of_teacher(recipe: Recipe, distill: DistillOptions) -> ModelOptions:
    return recipe.model.replace(
        frozen=[],
        name_or_path=str(distill.teacher),
        revision=distill.teacher_revision,
        dtype=distill.teacher_dtype or recipe.model.dtype,
        gguf_file=None,
        init="pretrained",
    )


@contextmanager
def _of_teacher() -> Iterator[None]:
    """Loaders know one key."""
    try:
        yield
    except ModelError as error:
        where = str(error.where).replace("model.name_or_path", "distill.teacher")
        raise ModelError(error.what, where=where, fix=error.fix) from error


def _frozen(recipe: Recipe, source: ModelOptions, device: torch.device) -> BuiltModel:
    built = build_model(
        source, packing=recipe.data.packing, lora=None, kernels=recipe.kernels, device=device
    )
    built.model.config.use_cache = False
    built.model.requires_grad_(False).eval()
    return built


def refuse_unfit_teacher(recipe: Recipe, tokenizer: Any) -> str | None:
    """Before anything is built, hold a teacher's tokens and context against the student's."""
    if recipe.distill is None or recipe.distill.teacher is None:
        return None
    source = _source_of_teacher(recipe, recipe.distill)
    with _of_teacher():
        check_exists(source)
        own, theirs = tokenizer.get_vocab(), load_tokenizer(source).get_vocab()
    if own != theirs:
        other = next(iter(sorted(set(own.items()) ^ set(theirs.items()))))[0]
        raise ModelError(
            f"{source.name_or_path} has other tokens than the student: {other!r} is not the same",
            where="distill.teacher",
            fix="take a teacher of the same family, or train on its answers: trainkit generate",
        )
    return context_warning(load_config(source), recipe.data.max_length, "the teacher")


def hooks_of(distill: DistillOptions | None, *, has_teacher: bool) -> list[Hook]:
    """What a distillation does besides its loss."""
    hooks: list[Hook] = [] if has_teacher else [ToldBefore()]
    if distill is not None and distill.on_policy is not None:
        hooks.append(DrawnAnswers(distill.on_policy))
    return hooks


class ToldBefore(Hook):
    """Before the first step, reads what the teacher has said from the files of the rows."""

    def begin(self, loop: LoopState, checkpoint: Path | None) -> None:
        for data in (loop.train_data, loop.eval_data):
            if data is not None:
                _read(data)


def _read(data: TrainingData) -> None:
    samples = data.samples
    assert isinstance(samples, ToldDataset)
    prepared, stored = samples.data, {}
    said: dict[tuple[int, int, int], tuple[np.ndarray, np.ndarray]] = {}
    for number, part in enumerate(prepared.parts):
        for file, path in enumerate(part.paths):
            for row in read_rows(path):
                try:
                    said[number, file, row.line] = teacher_of(decode_row(row))
                except RowError:
                    continue  # in the ledger
    width = 0
    for index in range(len(prepared)):
        number, place = prepared.find(index)
        store = prepared.parts[number].store
        found = said.get((number, int(store.file[place]), int(store.line[place])))
        if found is None or len(found[0]) != int(store.num_trained[place]):
            raise DataError(
                f"the teacher has spoken of {0 if found is None else len(found[0])} tokens of "
                f"{prepared.sample_id(index)}, and {int(store.num_trained[place])} are trained",
                where="data.max_length",
                fix="raise data.max_length, or write truncation: drop",
            )
        width = width or found[0].shape[1]
        if found[0].shape[1] != width:
            raise DataError(
                f"{prepared.sample_id(index)} has {found[0].shape[1]} tokens at each place, and "
                f"rows before it have {width}",
                where="data.train",
                fix="use files that were written with the same --logprobs",
            )
        stored[index] = found
    samples.stored = stored


# -- Answers that are drawn while the student trains ----------------------------------------------

Key = tuple[int, ...]
"""An epoch, a place in its order, and the sample there."""

_FILE = "drawn_rank{}.json"


class DrawnAnswers(Hook):
    """The loop's loader, which gives rows answers that the student or the teacher has drawn.

    What is drawn follows from the seed, the epoch, the row's place in it, and the weights at the
    first of ``every`` steps: a continued run draws the same again. Amid these steps the weights are
    others, so a checkpoint has the answers.
    """

    def __init__(self, options: OnPolicyOptions) -> None:
        self.options = options
        self.kept: dict[Key, list[int]] = {}

    def begin(self, loop: LoopState, checkpoint: Path | None) -> None:
        """Take the loader's place: rows are collated when they have their answers."""
        self.loop, as_they_are = loop, list
        _refuse_without_prompt(loop.train_data)
        data = replace(loop.train_data, collator=as_they_are)  # type: ignore[arg-type]
        self.rows: Any = train_loader(data, None, loop.args, loop.layout)
        loop.loader = self
        for path in [] if checkpoint is None else sorted(checkpoint.glob(_FILE.format("*"))):
            with taking_up(path):
                found = json.loads(path.read_text(encoding="utf-8"))
                self.kept |= {tuple(map(int, key)): [*map(int, ids)] for key, ids in found}
        if loop.run.options.dry_run:  # its one step is on the longest row, as it is given
            next(self.epoch(0))

    def save(self, loop: LoopState, save: Save) -> None:
        """What was drawn for steps that follow, too."""
        if self.options.every > 1 and loop.layout.counts_rows:
            path = save.directory / _FILE.format(loop.args.process_index)
            text = json.dumps([*self.kept.items()])
            save.attempt(partial(path.write_text, text, encoding="utf-8"))

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[dict[str, Any]]:
        """The micro-batches of an epoch, without the first ``skip``."""
        size = self.loop.args.gradient_accumulation_steps * self.options.every
        rows, number = self.rows.epoch(epoch, skip), skip
        while window := [*islice(rows, size - number % size)]:
            for items in self._answered(window, epoch, number):
                yield self.loop.train_data.collator(items)
            number += len(window)

    def _answered(self, window: Sequence[Any], epoch: int, number: int) -> list[list[Any]]:
        """The items of the micro-batches from ``number`` on."""
        args, layout, options = self.loop.args, self.loop.layout, self.options
        micro: list[dict[Key, Any]] = []
        for index, items in enumerate(window, number):
            first = (index * layout.data_size + layout.data_rank) * args.train_batch_size
            micro.append({(epoch, n, item["id"]): item for n, item in enumerate(items, first)})
        prompts: dict[Key, list[int]] = {}
        seeds: tuple[dict[Key, int], ...] = {}, {}  # of the student's answers, of the teacher's
        for key, item in (pair for items in micro for pair in items.items()):
            if not item["loss_mask"].any():  # it fills a batch
                continue
            random = np.random.default_rng([args.seed, *key])
            is_own, seed = random.random() < options.share, int(random.integers(1 << 62))
            if is_own or options.rest == "teacher":
                prompts[key], seeds[not is_own][key] = _prompt_of(item), seed
        self.kept = {key: ids for key, ids in self.kept.items() if key in prompts}
        for model, own in zip((self.loop.model, self.loop.run.teacher), seeds, strict=True):
            left = sorted(own.keys() - self.kept.keys(), key=lambda key: (len(prompts[key]), key))
            for start in range(0, len(left), options.batch_size):
                some = {key: prompts[key] for key in left[start : start + options.batch_size]}
                self.kept |= self._drawn(model, some, [own[key] for key in some])
        return [
            [
                _with_answer(item, prompts[key], self.kept[key]) if key in prompts else item
                for key, item in items.items()
            ]
            for items in micro
        ]

    def _drawn(
        self, model: Any, prompts: dict[Key, list[int]], seeds: Sequence[int]
    ) -> dict[Key, list[int]]:
        """An answer to each prompt; none is longer than a row may be."""
        run = self.loop.run
        end, pad = run.tokenizer.eos_token_id, run.tokenizer.pad_token_id
        stops = run.data.stop_token_ids or ([] if end is None else [end])
        longest, most = run.recipe.data.max_length, self.options.max_new_tokens
        rooms = [min(longest - len(prompt), most) for prompt in prompts.values()]
        with undisturbed(model), marking(run.watch, model):
            rows = draw_rows(
                model,
                [*prompts.values()],
                seeds,
                stops,
                end if pad is None else pad,
                max_new_tokens=max(rooms),
                temperature=self.options.temperature,
            )
        rows = [row[:room] for row, room in zip(rows, rooms, strict=True)]
        if model is self.loop.model:
            found = ([len(row) for row in rows], [row[-1] in stops for row in rows])
            values = [torch.tensor(each, device=model.device) for each in found]
            loss: Any = self.loop.loss
            loss.drawn.add(
                {
                    name: (each, torch.ones_like(each))
                    for name, each in zip(DRAWN_FIGURES, values, strict=True)
                }
            )
        return dict(zip(prompts, rows, strict=True))


def _prompt_of(sample: Mapping[str, Any]) -> list[int]:
    """All that is in front of the last answer."""
    trained = np.flatnonzero(sample["loss_mask"])
    begins = np.flatnonzero(np.diff(trained, prepend=-2) > 1)
    ids: list[int] = sample["input_ids"][: trained[begins[-1]]].tolist()
    return ids


def _with_answer(
    sample: Mapping[str, Any], prompt: Sequence[int], answer: Sequence[int]
) -> dict[str, Any]:
    ids = np.array([*prompt, *answer], dtype=sample["input_ids"].dtype)
    mask = (np.arange(len(ids)) >= len(prompt)).astype(sample["loss_mask"].dtype)
    return {**sample, "input_ids": ids, "loss_mask": mask}


def _refuse_without_prompt(data: TrainingData) -> None:
    prepared: PreparedData = data.samples.data  # type: ignore[attr-defined]
    for start, part in zip(prepared.starts, prepared.parts, strict=True):
        trained = np.flatnonzero(part.store.loss_mask[part.of(part.store.offsets[:-1])])
        if len(trained):
            raise DataError(
                f"{prepared.sample_id(int(start + trained[0]))} is trained from its first token "
                "on, so it has no prompt that an answer could be drawn to",
                where="distill.on_policy",
                fix="give conversations, or prompts with completions, and data.mask: assistant",
            )
