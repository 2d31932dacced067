"""Where a start begins: a new run directory, or a checkpoint that fits."""

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trainkit.checkpoint.weights.base_fingerprint import base_files, base_on_disk
from trainkit.checkpoint.whole.ownership import refuse_foreign
from trainkit.errors import CheckpointError
from trainkit.models.linears import packed_kind
from trainkit.parallel.agreement import decided_by_each, decided_by_main, refuse_disagreement
from trainkit.run import (
    RunDirectory,
)
from trainkit.run.starts import begin_again, read_starts
from trainkit.train.checkpoints import BASE, ResumePoint, find_resume_point
from trainkit.train.prepare import Invocation, Prepared
from trainkit.train.resume.changes import (
    IN_USE,
    PARTS,
    Review,
    review,
    review_running,
)
from trainkit.train.resume.given import RUNS
from trainkit.train.resume.hosts import settings_of_all
from trainkit.train.resume.record import Resumption
from trainkit.train.resume.settings import settings_of
from trainkit.train.resume.surroundings import code_digest, gpu_name, versions


def fingerprint_around(start: Invocation, prepared: Prepared) -> dict[str, Any]:
    """What surrounds a recipe and decides the curve; a continued run must share it."""
    args, recipe = prepared.args, start.recipe
    micro = args.per_device_train_batch_size * args.gradient_accumulation_steps
    quantize = recipe.lora.quantize if recipe.lora else None
    packages = packed_kind(quantize).packages if quantize else ()
    return {
        "data": prepared.data.fingerprint,
        PARTS: prepared.data.parts,
        "rows_per_step": micro * prepared.layout.data_size,
        "num_ranks": start.process.world_size,
        "device": args.device.type,
        "gpu": decided_by_main(start.process, gpu_name) if args.device.type == "cuda" else None,
        "code": code_digest(),
        "versions": versions((*prepared.layout.engine.packages, *packages)),
    }


def files_of_base(start: Invocation) -> dict[str, str] | None:
    """The digests of the base's files; None where another process of this host reads them.

    A model that trains whole has its weights in every checkpoint, whatever the base's are by then.
    None, too, of what cannot be read: the model will not load then, and that says why.
    """
    model, lora = start.recipe.model, start.recipe.lora
    if start.process.local_rank != 0:
        return None
    try:
        base = base_on_disk(model.name_or_path)
        is_frozen = lora is not None and model.init != "random"
        return base_files(base, weights=is_frozen, gguf_file=model.gguf_file)
    except (CheckpointError, OSError):
        return None


def refuse_other_hosts(start: Invocation, prepared: Prepared) -> None:
    """Stop where ranks have other settings or data: each host may have read files of its own."""
    around = {**fingerprint_around(start, prepared), "continues": str(start.options.resume)}
    del around[PARTS]
    refuse_disagreement(start.process, {**settings_of_all(start.loaded), **around})


def find_resumption(start: Invocation, prepared: Prepared) -> Resumption:
    """Find and verify the checkpoint to continue from; hashing it is one rank's work.

    Raises:
        CheckpointError: it is damaged, or not of the user's own.
        ResumeRefusedError: the run would not be what it was begun as.
    """
    fingerprint = fingerprint_around(start, prepared)
    console, resume = start.console, start.options.resume
    if resume is None:
        # Read while the model loads: its digests are known by the time they are asked for.
        threading.Thread(target=files_of_base, args=(start,), daemon=True).start()
        return Resumption(fingerprint)
    point = decided_by_main(start.process, lambda: find_resume_point(resume))
    if point is None:
        console.note(
            f"{resume} was stopped before its first checkpoint; it starts again from step 0, in "
            "the same directory"
        )
        return Resumption(fingerprint)
    sharded = prepared.layout.fits_its_ranks_only
    reviewed = decided_by_each(
        start.process, lambda: _reviewed(start, point, fingerprint, sharded=sharded)
    )
    if BASE not in point.fingerprint:
        console.note(
            f"{point.checkpoint.name} is of an older trainkit, which did not record every byte of "
            "the base: that it is still the same could not be checked"
        )
    for path, reason in point.skipped:
        console.warn(f"{path.name} is damaged and was passed over: {reason}")
    console.note(f"continuing from {point.checkpoint}")
    for change in reviewed.changes:
        console.note(f"from step {point.step} on, {change}")
    for change in reviewed.accepted:
        console.warn(f"not as it was, and accepted: {change}")
    return Resumption(fingerprint, point, reviewed)


def _reviewed(
    start: Invocation, point: ResumePoint, fingerprint: Mapping[str, Any], *, sharded: bool
) -> Review:
    """Hold recipe, surroundings and files of this host against the checkpoint."""
    reviewed = review(
        point,
        settings_of(start.loaded),
        {**fingerprint, BASE: files_of_base(start)},
        start.options.allow_changed,
        _accepted_before(point),
        sharded=sharded,
    )
    refuse_foreign(point.checkpoint)
    return reviewed


def _accepted_before(point: ResumePoint) -> list[Mapping[str, Any]]:
    starts = read_starts(RunDirectory.open(point.run))
    return [row for earlier in starts for row in earlier.accepted]


def review_built(start: Invocation, resumption: Resumption, runs: Mapping[str, Any]) -> Resumption:
    """Hold what runs in the built model against the checkpoint: kernels, and the attention.

    Where the recipe leaves them to the machine, another one may choose others, and nobody would
    see it.

    Args:
        start: what was typed.
        resumption: where it begins.
        runs: what the built model runs (`BuiltModel.runs`).

    Returns:
        The same with what was accepted, and ``runs`` in the fingerprint of what it saves.

    Raises:
        ResumeRefusedError: naming what runs otherwise.
    """
    fingerprint = {**resumption.fingerprint, IN_USE: dict(runs), BASE: files_of_base(start)}
    point, reviewed = resumption.point, resumption.review
    if point is not None and not any(_chooses(change.key) for change in reviewed.changes):
        allowed, before = start.options.allow_changed, _accepted_before(point)
        accepted = decided_by_each(
            start.process, lambda: review_running(point, fingerprint[IN_USE], allowed, before)
        )
        for change in accepted:
            start.console.warn(f"not as it was, and accepted: {change}")
        reviewed = replace(reviewed, accepted=(*reviewed.accepted, *accepted))
    return replace(resumption, fingerprint=fingerprint, review=reviewed)


_CHOOSING = ("kernels", "lora", "model.attn_implementation", "model.fp8", "data.packing")


def _chooses(key: str) -> bool:
    """Whether a change of this key asks for other kernels or another attention."""
    return key.startswith(_CHOOSING)


def open_run_directory(start: Invocation, resumption: Resumption) -> RunDirectory:
    """Make the run directory on rank 0, or open the one to continue; all ranks learn of it."""
    if resumption.point is not None:
        return RunDirectory.open(resumption.point.run)
    wanted, stopped = start.options.output_dir, start.options.resume
    if stopped is not None:
        return decided_by_main(start.process, lambda: begin_again(stopped))
    return decided_by_main(
        start.process,
        lambda: (
            RunDirectory.create_at(wanted)
            if wanted
            else RunDirectory.create(RUNS, start.loaded.name)
        ),
    )
