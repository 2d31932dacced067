"""From a recipe to a plan, and to how many tokens its data has."""

from __future__ import annotations

import glob
import json
import math
import os
import re
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from trainkit.errors import ModelError, TrainkitError
from trainkit.estimate.estimate import Replan
from trainkit.estimate.job import Adapters, ModelShape
from trainkit.estimate.peak import RANK, keep_to_budget, optimizer_bytes, split
from trainkit.estimate.plan import ALL_OPS, MIN_OFFLOAD_WIDTH, Plan, within_budget
from trainkit.estimate.shape import find_shape
from trainkit.options import Fp8Options, LoraOptions, RecomputeOptions
from trainkit.options.optimizers import optimizer_row
from trainkit.options.parallel import ParallelOptions
from trainkit.options.training import PAIRED
from trainkit.options.vision import VISION
from trainkit.parallel.pipeline.share import Share
from trainkit.parallel.strategies import strategy_for
from trainkit.recipe import LoadedRecipe, Recipe, resolve_accumulation
from trainkit.recipe.training import CHECKPOINTING

MICRO_BATCH = 8
"""Rows, where a recipe says nothing: transformers' default."""

BYTES_PER_TOKEN = 4.4
"""Of a JSON Lines file of conversations: for a rough count without a tokenizer."""


def plan_of(recipe: Recipe, gpus: int, shape: ModelShape | None = None) -> Plan:
    place, file = recipe.model.name_or_path, recipe.model.gguf_file
    place = place if file is None else str(Path(place, file))
    shape = shape or find_shape(place, recipe.model.revision)
    data_ranks, sequence = recipe.parallel.data_ranks(gpus), recipe.parallel.sequence
    training = recipe.training
    lora = recipe.lora
    strategy = strategy_for(recipe.parallel.shard)
    zero: dict[str, Any] = {}
    if strategy.config is not None:
        zero = json.loads(strategy.config.read_text(encoding="utf-8")).get("zero_optimization", {})
    fsdp = strategy.name == "fsdp2"
    dtype = "bfloat16" if recipe.model.dtype == "auto" else recipe.model.dtype
    row = optimizer_row(training.get("optim"))
    part = split(shape, recipe.parallel.tensor)
    packs, together = recipe.data.packing, 2 if recipe.objective in PAIRED else 1
    sees = shape.family in VISION and has_images(recipe)
    plan = Plan(
        shape=shape,
        batch_size=int(training.get(_ROWS, MICRO_BATCH)) * (1 if packs else together),
        length=recipe.data.max_length * (together if packs else 1),
        accumulation=resolve_accumulation(recipe, data_ranks),
        sequence=sequence,
        tensor=recipe.parallel.tensor,
        stage_layers=_stages(recipe.parallel, shape),
        schedule=recipe.parallel.schedule,
        base=_base(lora, shape) or ("bfloat16" if dtype == "float16" else dtype),
        adapters=None
        if lora is None
        else _adapters(lora, shape, adds_tokens=recipe.model.adds_tokens),
        ops=_ops(recipe.kernels),
        masked=recipe.model.attn_implementation == "sdpa" and not recipe.data.packing,
        stage=3 if fsdp else int(zero.get("stage", 0)),
        fsdp=fsdp,
        offloads_optimizer=_goes_to_host(zero, "offload_optimizer"),
        offloads_weights=_goes_to_host(zero, "offload_param"),
        gpus=data_ranks * sequence,
        chunk_tokens=recipe.model.loss_chunk_tokens,
        tile_tokens=recipe.model.mlp_chunk_tokens,
        keeps_masters=recipe.model.master_weights,
        one_pass=row.one_pass,
        in_backward=recipe.optim_in_backward,
        flat=row.name == "flat_adamw",
        paged=row.paged,
        slower=row.slower,
        stepping=(row.step_bytes, row.step_largest_bytes),
        train=tuple(recipe.model.train),
        optimizer=optimizer_bytes(
            row, part, full=lora is None, rank=_rank(training), args=training.get("optim_args")
        ),
    )
    plan = replace(plan, **_second(recipe, plan))
    # As many as a row may hold: the run itself counts those of its data.
    plan = replace(plan, image_tokens=plan.tokens if sees else 0)
    return _recomputing(_in_fp8(plan, recipe), recipe)


def _second(recipe: Recipe, plan: Plan) -> dict[str, Any]:
    """The weights of another model that is there whole, and what its logits go into."""
    options = recipe.distill
    if options is None or options.teacher is None:
        shape, dtype = plan.shape, recipe.model.dtype
        if recipe.asks_reference != "second model":
            return {}
    else:
        dtype = options.teacher_dtype or recipe.model.dtype
        try:
            shape = find_shape(options.teacher, options.teacher_revision)
        except ModelError as error:
            raise ModelError(error.what, where="distill.teacher", fix=error.fix) from error
    found = {"second": float((shape.parameters + shape.tower) * (4 if dtype == "float32" else 2))}
    if options is None:
        return found
    return {**found, "distill": (options.replace(on_policy=None), shape.vocab, shape.hidden)}


def has_images(recipe: Recipe) -> bool:
    """Whether rows have images: of what sees something trains, or some of the first rows do."""
    if recipe.model.train != ["text"] or (recipe.lora is not None and recipe.lora.vision):
        return True
    # Only here: an estimate begins without torch, which these bring.
    from trainkit.data.files import is_data, read_rows
    from trainkit.data.formats import decode_row
    from trainkit.data.image_rows import has_images as have_images
    from trainkit.data.messages import RowError

    files = [file for source in recipe.data.train for file in _files(source.path)]
    for file in filter(is_data, files):
        with suppress(TrainkitError, RowError, OSError, EOFError):
            if any(have_images(decode_row(row)) for row in islice(read_rows(file), _LOOKED_AT)):
                return True
    return False


_LOOKED_AT = 20
"""Rows of each file: which of them have images is not mixed in most."""


def _base(lora: LoraOptions | None, shape: ModelShape) -> str | None:
    """What a frozen base is packed in, by the recipe or in its files; None where it is not."""
    if lora is None:
        return None
    return lora.quantize or ("nf4" if shape.stored == "nf4" else None)


def replanning(loaded: LoadedRecipe, gpus: int) -> Replan:
    """Plans of a recipe with more settings on top: it is read with them, as a run would."""

    def replan(settings: str, before: Plan) -> Plan | None:
        try:
            recipe = loaded.overridden(settings.split()).recipe
            plan = plan_of(recipe, gpus, before.shape)
        except TrainkitError:
            return None
        # Rows as they were found to be, and not as the recipe bounds them.
        plan = replace(plan, length=before.length, gpu_gib=before.gpu_gib)
        if _ROWS not in settings:
            plan = replace(plan, batch_size=before.batch_size, accumulation=before.accumulation)
        images = math.ceil(before.image_tokens * plan.tokens / before.tokens)
        plan = replace(plan, image_tokens=images)
        return keep_to_budget(plan)

    return replan


_ROWS = "per_device_train_batch_size"


def _stages(parallel: ParallelOptions, shape: ModelShape) -> tuple[tuple[int, ...], ...]:
    """Layers of each stage of each rank; nothing without a pipeline."""
    if parallel.pipeline == 1:
        return ()
    head = shape.table * shape.layers / max(shape.matrix_numbers, 1)
    shares = [Share.of(parallel, rank, shape.layers, head) for rank in range(parallel.pipeline)]
    return tuple(tuple(map(len, share.stages.values())) for share in shares)


def _recomputing(plan: Plan, recipe: Recipe) -> Plan:
    options = RecomputeOptions.of(recipe.recompute)
    if recipe.recompute is None and any(map(recipe.training.get, CHECKPOINTING[:2])):
        options = RecomputeOptions(every=1)
    if options is None:
        return plan
    if options.offload != "auto":
        adapters = plan.adapters and replace(plan.adapters, offload=options.offload)
        plan = replace(plan, offload=options.offload, adapters=adapters)
    if options.budget_gib is None:
        return replace(plan, recompute=options.every or 0, selective=options.selective)
    offloads = options.offload is not False
    return keep_to_budget(replace(plan, budget_gib=options.budget_gib, budget_offloads=offloads))


def _rank(training: dict[str, Any]) -> int:
    found = re.search(r"(?:^|,)\s*rank\s*=\s*(\d+)", str(training.get("optim_args") or ""))
    return RANK if found is None else int(found.group(1))


def notes_of(recipe: Recipe, plan: Plan) -> list[str]:
    """What a reader of the estimate should know."""
    found = uncounted(recipe, plan.shape)
    recorded = plan.recorded
    if recorded.plain is not None:
        found.append(f"counted without trainkit's kernels: {recorded.plain}")
    if recorded.assumed:
        found.append(
            f"the model asks numbers of the GPU ({', '.join(sorted(recorded.assumed))}): experts "
            "are taken to get equal shares, and a batch to be the same throughout"
        )
    row = optimizer_row(recipe.training.get("optim"))
    if row.paged:
        found.append(
            f"{row.name} keeps {row.paged:.3g} bytes of state a trained number in pages of host "
            "memory; the GPU holds what it has room for"
        )
    if plan.image_tokens == plan.tokens:
        found.append("every token is taken to be of an image: the most that rows can hold")
    if not recipe.data.packing:
        found.append("every row is taken to be data.max_length long: the worst batch, not the mean")
    return found


_NO_REFERENCE = "the time in which a reference is asked is left out"
_LEFT_OUT = {
    "dpo": _NO_REFERENCE,
    "kto": f"{_NO_REFERENCE}, and the pass over foreign answers",
    "dft": "of a trained head the second product over the vocabulary is left out",
    "eaft": "the logits of the trained tokens, which it keeps, are left out",
    "orpo": "of a trained head the second product over the vocabulary is left out",
    "simpo": "of a trained head the second product over the vocabulary is left out",
    "reward": "it takes less: its head has one output",
    "distill": "the time in which a teacher is asked is left out",
}
"""What the estimate does not know of an objective."""


def uncounted(recipe: Recipe, shape: ModelShape) -> list[str]:
    """What of a recipe the estimate leaves out; with such a part it refuses nothing."""
    found = []
    if shape.stored not in (None, "nf4"):
        found.append(f"the files hold quantised weights ({shape.stored}); counted in model.dtype")
    if recipe.lora is not None and recipe.lora.quantize == "int8":
        found.append("lora.quantize: int8 has not been measured; counted as a byte a weight")
    if recipe.lora is not None and recipe.lora.quantize_skip != _kinds_skipped(recipe.lora):
        found.append("lora.quantize_skip: layers that it names by number are counted as packed")
    if recipe.model.frozen:
        found.append("model.frozen is not counted: what does not train takes less")
    if recipe.training.get("torch_compile"):
        found.append("training.torch_compile is not counted: measure with --dry-run")
    if recipe.model.attn_implementation == "eager":
        found.append("model.attn_implementation: eager is not counted: it keeps all scores")
    if recipe.objective != "sft":
        found.append(
            f"objective {recipe.objective} is counted as sft: {_LEFT_OUT[recipe.objective]}"
        )
    return found


def _kinds_skipped(lora: LoraOptions) -> list[str]:
    """Layers that keep 16 bits whatever their number: the model has few layers here."""
    return [part for part in lora.quantize_skip if not re.search(r"(^|\.)\d+(\.|$)", part)]


def _adapters(lora: LoraOptions, shape: ModelShape, *, adds_tokens: bool) -> Adapters:
    offload, saved = lora.offload_activations, list(lora.modules_to_save)
    if adds_tokens:  # both ends of the vocabulary train whole
        saved += [end for end in shape.ends if end not in saved]
    return Adapters.of(
        lora.replace(modules_to_save=saved, quantize_skip=_kinds_skipped(lora)),
        offload=shape.hidden >= MIN_OFFLOAD_WIDTH if offload == "auto" else offload,
    )


def _in_fp8(plan: Plan, recipe: Recipe) -> Plan:
    options = Fp8Options.of(recipe.model.fp8)
    if recipe.lora is not None:
        options = (options or Fp8Options()) if recipe.lora.quantize == "fp8" else None
    if options is None:
        return plan
    return within_budget(plan, options)


def _ops(kernels: bool | dict[str, bool]) -> frozenset[str]:
    if isinstance(kernels, bool):
        return ALL_OPS if kernels else frozenset()
    return frozenset(op for op in ALL_OPS if kernels.get(op, True))


def _goes_to_host(zero: dict[str, Any], key: str) -> bool:
    device = (zero.get(key) or {}).get("device", "none")
    return device not in (None, "none")


def tokens_of(recipe: Recipe, plan: Plan) -> tuple[float, str] | None:
    """Tokens that a recipe trains on in all, and how they were counted; None where nobody can say.

    From ``max_steps`` where it decides, else from the sizes of local files: no tokenizer runs.
    """
    per_step = plan.tokens * plan.accumulation * plan.gpus
    max_steps = int(recipe.training.get("max_steps", -1))
    if max_steps > 0:
        return float(max_steps * per_step), f"training.max_steps x {per_step:,} tokens"
    size = 0.0
    for source in recipe.data.train:
        if not isinstance(source, str):
            files, times = _files(source.path), source.epochs
        else:
            files, times = _files(source), 1.0
        if not files:
            return None
        size += times * sum(file.stat().st_size for file in files)
    if not size:
        return None
    epochs = float(recipe.training.get("num_train_epochs", 3.0))
    total = size / BYTES_PER_TOKEN * epochs
    return total, f"about {BYTES_PER_TOKEN} bytes a token of the files of data.train"


def _files(place: str) -> list[Path]:
    path = Path(place).expanduser()
    if path.is_dir():
        return [each for each in path.rglob("*") if each.is_file()]
    if path.is_file():
        return [path]
    return [Path(found) for found in glob.glob(os.fspath(path), recursive=True)]  # noqa: PTH207
