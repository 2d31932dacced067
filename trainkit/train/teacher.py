"""A second model: the teacher of a distillation, or the model before training, live.

What a teacher has said may be in the rows instead.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainkit.data.fields import teacher_of
from trainkit.data.files import read_rows
from trainkit.data.formats import decode_row
from trainkit.data.messages import RowError
from trainkit.errors import DataError, ModelError
from trainkit.models.tokenizer import load_tokenizer
from trainkit.objectives.distill import ToldDataset
from trainkit.objectives.objective import TrainingData
from trainkit.options import ModelOptions
from trainkit.recipe import Recipe
from trainkit.train.hooks import Hook, LoopState
from trainkit.train.model import BuiltModel, build_model


def second_model(recipe: Recipe, device: torch.device, tokenizer: Any = None) -> BuiltModel | None:
    """The frozen model that the loss asks at each step; None where it asks none.

    A teacher must have the tokens of the student's ``tokenizer``; without one nobody looks.
    """
    source = recipe.model.replace(frozen=[])
    if recipe.distill is not None and recipe.distill.teacher is not None:
        source = source.replace(
            name_or_path=recipe.distill.teacher,
            revision=recipe.distill.teacher_revision,
            dtype=recipe.distill.teacher_dtype or source.dtype,
            gguf_file=None,
            init="pretrained",
        )
        try:
            if tokenizer is not None:
                _refuse_other_tokens(source, tokenizer)
            return _frozen(recipe, source, device)
        except ModelError as error:  # loaders know one key
            where = str(error.where).replace("model.name_or_path", "distill.teacher")
            raise ModelError(error.what, where=where, fix=error.fix) from error
    return _frozen(recipe, source, device) if recipe.asks_reference == "second model" else None


def _frozen(recipe: Recipe, source: ModelOptions, device: torch.device) -> BuiltModel:
    built = build_model(
        source, packing=recipe.data.packing, lora=None, kernels=recipe.kernels, device=device
    )
    built.model.config.use_cache = False
    built.model.requires_grad_(False).eval()
    return built


def _refuse_other_tokens(source: ModelOptions, tokenizer: Any) -> None:
    own, theirs = tokenizer.get_vocab(), load_tokenizer(source).get_vocab()
    if own != theirs:
        other = next(iter(sorted(set(own.items()) ^ set(theirs.items()))))[0]
        raise ModelError(
            f"{source.name_or_path} has other tokens than the student: {other!r} is not the same",
            where="distill.teacher",
            fix="take a teacher of the same family, or train on its answers: trainkit generate",
        )


class ToldBefore(Hook):
    """Before the first step, reads what the teacher has said from the files of the rows."""

    def begin(self, loop: LoopState, checkpoint: Path | None) -> None:
        for data in (loop.train_data, loop.eval_data):
            if data is not None:
                _read(data)


def _read(data: TrainingData) -> None:
    """Fill `ToldDataset.stored`."""
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
