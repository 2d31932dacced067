"""What the model before training says of each answer: computed once, before the first step.

Kept by the answer's own tokens and mask, so that neither the order of the data nor a learning rate
has it computed again, under a key of all that decides the numbers: the base's files, dtype and
quantisation, attention, kernels, code. A run has its own copy, which a continued run reads: its
weights are not those of the reference any more.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import time
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainkit.checkpoint.weights.base_fingerprint import base_files, base_on_disk
from trainkit.errors import CheckpointError, ResumeRefusedError, TrainkitError
from trainkit.objectives.answers import AnswerDataset, AnswerLoss
from trainkit.objectives.objective import TrainingData, take_counts, take_sample_ids
from trainkit.parallel.agreement import decided_by_main
from trainkit.places import cache_of
from trainkit.train.data import sample_loader
from trainkit.train.evaluations import undisturbed
from trainkit.train.hooks import Hook, LoopState
from trainkit.train.resume.surroundings import code_digest, versions

if TYPE_CHECKING:
    from trainkit.train.run import Run

FILE = "reference.npz"
"""The run's own copy."""

_DIGEST = "S16"
_PROBED, _FAR = 8, 0.05
"""So many answers of a cache are computed again, and may differ by so many nats a token."""

_LEFT_OUT = {"name_or_path", "revision", "gguf_file", "trust_remote_code", "loss_chunk_tokens"}
_LEFT_OUT |= {"master_weights", "frozen", "attn_implementation"}
"""Keys of ``model`` that say where the weights are, or do not change what they say."""

Known = dict[bytes, float]


def reference_key(run: Run) -> str | None:
    """The name of all that decides what the reference says; None where that cannot be told."""
    recipe, model = run.recipe, run.recipe.model
    is_random = model.init == "random"
    try:
        base = base_on_disk(model.name_or_path, model.revision)
        files = base_files(base, weights=not is_random, gguf_file=model.gguf_file)
    except (CheckpointError, OSError):
        return None
    decides = {
        "files": files,
        "seed": run.args.seed if is_random or model.adds_tokens else None,
        "model": model.model_dump(mode="json", exclude=_LEFT_OUT),
        "quantize": recipe.lora.packing if recipe.lora else None,
        "runs": run.built.runs,
        "fp8": run.built.fp8_choice and run.built.fp8_choice.directions,
        "autocast": (run.args.bf16, run.args.fp16),
        "device": run.args.device.type,
        "code": code_digest(("kernels", "models", "objectives")),
        "versions": versions(()),
    }
    text = json.dumps(decides, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def read_known(path: Path) -> Known:
    """What a file holds; nothing of one that is not there or not whole: it is computed again."""
    try:
        with np.load(path, allow_pickle=False) as kept:
            digests, values = kept["digests"].astype(_DIGEST), kept["values"]
            is_whole = str(kept["sha256"]) == _sum_of(digests, values)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return {}
    # Zeros at the end, which numpy takes for padding, are put back.
    keys = (each.ljust(16, b"\0") for each in digests.tolist())
    return dict(zip(keys, values.tolist(), strict=True)) if is_whole else {}


def write_known(path: Path, known: Mapping[bytes, float]) -> None:
    """Replace a file by one that holds this; what is read of it meanwhile is the old one."""
    digests = np.array(list(known), dtype=_DIGEST)
    values = np.array(list(known.values()), dtype=np.float64)
    path.parent.mkdir(parents=True, exist_ok=True)
    mine = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with mine.open("wb") as stream:
            np.savez(stream, digests=digests, values=values, sha256=_sum_of(digests, values))
            stream.flush()
            os.fsync(stream.fileno())
        mine.replace(path)
    finally:
        mine.unlink(missing_ok=True)


def _sum_of(digests: np.ndarray, values: np.ndarray) -> str:
    return hashlib.sha256(digests.tobytes() + values.tobytes()).hexdigest()


def digest_of(input_ids: np.ndarray, loss_mask: np.ndarray) -> bytes:
    """The name of an answer in its context: what it is asked after, and what of it is scored."""
    found = hashlib.blake2b(np.ascontiguousarray(input_ids, dtype=np.int32).tobytes())
    scored = np.ascontiguousarray(np.asarray(loss_mask) != 0, dtype=np.uint8)
    found.update(scored.tobytes())
    return found.digest()[:16]


class References(Hook):
    """Before the first step, has the reference say what the cache does not know yet."""

    def begin(self, loop: LoopState, checkpoint: Path | None) -> None:
        """Of all data, those held out too."""
        run, loss = loop.run, loop.loss
        assert isinstance(loss, AnswerLoss)
        own = run.root / FILE
        key = decided_by_main(run.process, lambda: reference_key(run))
        folder = run.data_options.cache_dir
        cache = Path(folder) / "reference" if folder else cache_of("reference")
        shared = cache / f"{key}.npz"
        can_ask = checkpoint is None or run.recipe.lora is not None
        known: Known = {}
        if run.process.is_main:
            known = read_known(own) if checkpoint is not None else {}
            if key is not None and can_ask:
                known |= read_known(shared)
        before = len(known)
        started = time.perf_counter()
        all_data = [each for each in (loop.train_data, loop.eval_data) if each is not None]
        for data in all_data:
            _fill(loop, loss, data, known, can_ask=can_ask)
        loss.reads_stored = True
        if run.process.is_main and len(known) > before:
            write_known(own, known)
            if key is not None:
                with suppress(OSError):  # a cache that cannot be written is no reason to stop
                    write_known(shared, read_known(shared) | known)
        elif run.process.is_main and not own.exists():
            write_known(own, known)
        run.console.note(
            f"reference: log-probabilities of {len(known) - before} answers computed in "
            f"{time.perf_counter() - started:.1f} s, {before} known before"
        )


def _fill(
    loop: LoopState, loss: AnswerLoss, data: TrainingData, known: Known, *, can_ask: bool
) -> None:
    """Give a dataset its ``reference``; what the model says now becomes known."""
    samples = data.samples
    assert isinstance(samples, AnswerDataset)
    run, device = loop.run, loop.args.device
    names = [[digest_of(*each) for each in samples.scored(n)] for n in range(len(samples.data))]
    kept = np.array([[known.get(one, np.nan) for one in row] for row in names])
    table = _from_main(loop, kept)
    is_missing = np.isnan(table).any(1)
    if not can_ask and is_missing.any():
        raise ResumeRefusedError(
            f"{int(is_missing.sum())} answers have no log-probabilities of the model before "
            "training, whose weights are not these any more",
            where=str(run.root / FILE),
            fix="put the file back, go on with the same data, or begin a new run",
        )
    firsts = samples.firsts
    of_item = np.array([is_missing[n : n + samples.together].any() for n in firsts], dtype=bool)
    probed = np.flatnonzero(~of_item)[:_PROBED] if can_ask else np.empty(0, dtype=np.int64)
    wanted = np.concatenate([firsts[of_item], firsts[probed]])
    if not len(wanted):
        samples.reference = table
        return
    mine = torch.from_numpy(_answers(loop, loss, data, wanted, table.shape)).to(device)
    found = loop.ranks.reduce(mine).cpu().numpy()
    counts, sums = found[..., 0], found[..., 1]
    with np.errstate(invalid="ignore"):
        said = sums / counts
    checked = [n + side for n in firsts[probed] for side in range(samples.together)]
    lengths = np.maximum(samples.data.num_trained[checked], 1)[:, None]
    gap = float(np.nanmax(np.abs(said[checked] - table[checked]) / lengths, initial=0.0))
    if gap > _FAR:
        raise TrainkitError(
            f"the reference's log-probabilities in the cache are {gap:.2g} nats a token off what "
            "the model says now",
            where="preference.precompute_reference",
            fix="remove the folder reference/ of the data cache",
        )
    table = np.where(np.isnan(table), said, table)
    table = np.nan_to_num(table)  # of samples without a token that is scored
    if run.process.is_main:
        for row, values in zip(names, table, strict=True):
            known.update(zip(row, values.tolist(), strict=True))
    samples.reference = table


def _from_main(loop: LoopState, kept: np.ndarray) -> np.ndarray:
    mine = kept if loop.ranks.is_main_process else np.full_like(kept, 0.0)
    known = torch.from_numpy(np.stack((np.nan_to_num(mine), np.isnan(mine))))
    values, missing = loop.ranks.reduce(known.to(loop.args.device)).cpu().numpy()
    return np.where(missing > 0, np.nan, values)


def _answers(
    loop: LoopState,
    loss: AnswerLoss,
    data: TrainingData,
    firsts: np.ndarray,
    shape: tuple[int, ...],
) -> np.ndarray:
    """(N, columns, 2) how often this rank has asked the reference of a sample, and what it said."""
    some: Any = copy.copy(data.samples)
    some.reference = None
    some.set_epoch = lambda epoch: None
    sizes = some.data.lengths[firsts]
    some.take(firsts[np.argsort(-sizes, kind="stable")])  # rows of like length meet
    batches = sample_loader(
        replace(data, samples=some), loop.args, loop.layout, loop.args.eval_batch_size
    )
    found = np.zeros((*shape, 2))
    with undisturbed(loop.model):
        for batch in batches:
            ids = np.array(take_sample_ids(batch))
            take_counts(batch, loss.num_items)
            scored = torch.bincount(
                batch["answer_ids"][batch["labels"] != -100], minlength=len(ids)
            )[: len(ids)].numpy()
            values = loop.engine.evaluate(loop.prepare(batch), loss.reference).cpu().numpy()
            is_real = scored > 0  # the loader fills batches up with samples without a token
            found[ids[is_real], :, 0] += 1
            found[ids[is_real], :, 1] += values[: len(ids)][is_real]
    return found
