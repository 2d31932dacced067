"""A recipe for a model, data and a GPU that somebody has: a shipped one, made to fit."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trainkit.errors import ModelError, RecipeError
from trainkit.estimate.estimate import Estimate, estimate
from trainkit.estimate.gpus import Gpu
from trainkit.estimate.job import ModelShape
from trainkit.estimate.recipe import plan_of, replanning
from trainkit.estimate.shape import NAMED, find_config, from_config
from trainkit.options.training import PAIRED
from trainkit.places import local_path
from trainkit.recipe.document import parse_override
from trainkit.recipe.load import load_recipe
from trainkit.recipe.write import shipped_text, with_values

OBJECTIVES: Mapping[str, Mapping[str, tuple[Any, str]]] = {
    "dpo": {
        "preference.beta": (0.1, "how hard the model is held to what it was"),
        "training.learning_rate": (5e-6, "peak; a tenth of what adapters usually take"),
    },
    "kto": {
        "preference.beta": (0.1, "how hard the model is held to what it was"),
        "training.learning_rate": (5e-6, "peak; a tenth of what adapters usually take"),
    },
    "orpo": {
        "preference.beta": (0.1, "weight of the odds next to the better answer's cross entropy"),
        "training.learning_rate": (5e-5, "peak, per step"),
    },
    "simpo": {
        "preference.beta": (2.0, "what the difference of log-probabilities is multiplied with"),
        "preference.gamma": (0.5, "the margin that is aimed at"),
        "training.learning_rate": (5e-6, "peak; a tenth of what adapters usually take"),
    },
    "reward": {
        "preference.center_rewards": (0.01, "keeps the rewards around 0"),
        "training.learning_rate": (1e-4, "peak, per step"),
    },
    "distill": {
        "distill.divergence": (
            "forward_kl",
            "from rows of `trainkit generate --logprobs K`; teacher: MODEL asks one at each step",
        ),
        "distill.sft_weight": (0.1, "part of the cross entropy in the loss"),
        "training.learning_rate": (1e-4, "peak, per step"),
    },
}
"""Keys of recipes that do not train on answers alone, with their comments."""

METHODS = {
    "full": "all weights",
    "lora": "LoRA adapters",
    "qlora": "LoRA over a 4-bit base",
    "fp8": "LoRA over a base in 8 bits",
    **{name: f"{name} over LoRA adapters" for name in OBJECTIVES},
}
"""What ``trainkit new --method`` takes, in words."""

_SMALL = 3_000_000_000
"""Weights up to which a full recipe begins with ZeRO-2 and without checkpointing."""

_COMMENTS = {
    "model.dtype": "of the weights in memory",
    "lora.r": "rank of each adapter",
    "lora.quantize": "the frozen base in 8 bits, as far as the loss bears it",
    "training.save_only_model": "true: smaller checkpoints, but no --resume",
}
"""In place of those that speak of the shipped recipe's model."""

_SHARDED = {
    "zero1": "shard the optimizer over the GPUs",
    "zero2": "shard optimizer and gradients over the GPUs",
    "zero3": "shard weights, gradients and optimizer over the GPUs",
    "zero3_offload": "shard weights, gradients and optimizer, in the host's memory",
}
_RECOMPUTED = "activations are computed twice instead of kept; false keeps them"
_TILES = "so many at a time: hardly slower, and small"
_LOWERED = {
    "recompute": _RECOMPUTED,
    "recompute.every": "each so many layers compute their activations twice",
    "recompute.offload": "what the others keep waits in the host's memory",
    "model.loss_chunk_tokens": _TILES,
    "model.mlp_chunk_tokens": _TILES,
}
"""Behind what makes it fit."""

_OFFLOADED = "zero3_offload"

_FRUGAL = "llama3.1-8b-full-18gib"
"""What takes the least of one GPU, and several times less of the host than offloading."""

_FRUGAL_COMMENTS = {
    "model.loss_chunk_tokens": _TILES,
    "optim_in_backward": "one weight's gradient at a time, instead of all of them",
    "training.optim": "two moments of 8 bits a weight, on the host where the GPU is full",
}

_FRUGALLY = (
    "model.master_weights=false",
    "training.optim=paged_adamw_8bit",
    "optim_in_backward=true",
    "recompute={every: 1, offload: true}",
)
"""What it does that the others do not."""

_OF_MODEL = {
    "data.packing": "documents of one row might see each other in this kind of model",
    "preference.share_prompts": "a prompt is computed once for both of its answers",
}
"""Why the model takes less than the shipped recipe has, or more."""

_LIKE = {"lora": "qwen2-7b-lora", "qlora": "qwen2-7b-qlora", "fp8": "qwen2-7b-lora"}


@dataclass(frozen=True)
class Fitted:
    """A recipe as text.

    Attributes:
        expected: what a run takes; None where nobody knows the model's size.
        changed: overrides that were needed to make it fit.
    """

    text: str
    expected: Estimate | None
    changed: Sequence[str]


def fitted_recipe(
    model: str,
    data: Sequence[Any],
    method: str,
    gpu: Gpu,
    gpus: int = 1,
    of_model: Mapping[str, bool] | None = None,
) -> Fitted:
    """Fill a shipped recipe in, and lower what it takes until the GPU has it."""
    path = local_path(model)
    if model.lower() in NAMED and path is None:
        raise ModelError(
            f"{model} is a shape that `trainkit estimate` knows, and no model that can be loaded",
            where="--model",
            fix="give the hub name with its owner, as in Qwen/Qwen2.5-7B-Instruct, or a directory",
        )
    if path is not None and not path.exists():
        raise ModelError(
            f"there is no model at {path.absolute()}",
            where="--model",
            fix="give a directory that save_pretrained wrote, a .gguf file, or a hub name",
        )
    config, shape = _known_of(model)
    name = re.sub(r"[^\w.-]+", "-", Path(model).name.lower()).strip("-.") or "model"
    values: dict[str, Any] = {"name": f"{name}-{method}", "model.name_or_path": model}
    kind = "lora" if method in OBJECTIVES else method
    shipped = shipped_text(_like(kind, shape))
    own, comments = _of_objective(method)
    values |= {"model.dtype": "bfloat16", **own}
    from trainkit.models.context import context_of  # which comes with torch

    context = context_of(config)
    longest = re.search(r"^  max_length: (\d+)", shipped, re.MULTILINE)
    if context is not None and longest is not None and context < int(longest[1]):
        values["data.max_length"] = context
        comments["data.max_length"] = "longest sample and packed row: all that the model can read"
        comments["global_batch_size"] = "rows per step over all GPUs"
    values |= {"data.train": list(data)} if data else {}
    if kind == "full" and gpus == 1:
        values["deepspeed"] = None
    if kind != "full":
        values["lora.r"] = 16
    if kind == "fp8" and not gpu.fp8:
        raise RecipeError(f"{gpu.name} has no cores for fp8", where="--method", fix="take qlora")
    values |= {"lora.quantize": "fp8"} if kind == "fp8" else {}
    for key, value in (of_model or {}).items():
        values[key] = value
        comments[key] = _OF_MODEL[key]
    text = with_values(shipped, values, comments)
    changed: tuple[str, ...] = ()
    found = _estimated(text, gpu, gpus, shape)
    if found is not None and not found.fits:
        same = [each for each in found.suggestions if not each.changes_result]
        is_offloaded = not same or _OFFLOADED in same[0].settings
        if method == "full" and gpus == 1 and is_offloaded:
            values.pop("deepspeed")
            comments.pop("global_batch_size", None)
            frugal = with_values(shipped_text(_FRUGAL), values, {**comments, **_FRUGAL_COMMENTS})
            small = _estimated(frugal, gpu, gpus, shape)
            if small is not None and small.fits:
                return Fitted(_with_header(frugal, model, method, small), small, _FRUGALLY)
        if not same:
            raise _too_large(found)
        # global_batch_size stays, and with it the number of rows a step
        settings = same[0].settings.split()
        changed = tuple(each for each in settings if "accumulation" not in each)
        lower = dict(_setting(each) for each in changed)
        said = {key: _LOWERED[key] for key in lower if key in _LOWERED}
        if lower.get("deepspeed") in _SHARDED:
            said["deepspeed"] = _SHARDED[lower["deepspeed"]]
        text = with_values(text, lower, said)
        found = _estimated(text, gpu, gpus, shape)
    return Fitted(_with_header(text, model, method, found), found, changed)


def _of_objective(method: str) -> tuple[dict[str, Any], dict[str, str]]:
    """What a method that does not train on answers alone adds, and all comments."""
    own, values, comments = OBJECTIVES.get(method, {}), dict[str, Any](), dict(_COMMENTS)
    if own:
        values = {"objective": method, "training.num_train_epochs": 1}
        values |= {key: value for key, (value, _) in own.items()}
        comments |= {key: said for key, (_, said) in own.items()}
        comments["objective"] = "what is optimised; its rows: docs/guides/preferences.md"
    if method in PAIRED:
        values["training.per_device_train_batch_size"] = 2
        comments["training.per_device_train_batch_size"] = "rows of pairs, each twice as long"
    return values, comments


def _known_of(model: str) -> tuple[Mapping[str, Any], ModelShape | None]:
    """Its configuration, empty where it is not at hand, and its sizes if they were counted."""
    try:
        config, place = find_config(model)
    except ModelError:
        return {}, None
    try:
        return config, from_config(config, place)
    except ModelError:
        return config, None


def _like(method: str, shape: ModelShape | None) -> str:
    if method != "full":
        return _LIKE[method]
    is_small = shape is not None and shape.parameters < _SMALL
    return "qwen2-0.5b-full" if is_small else "qwen2-7b-full"


def _setting(override: str) -> tuple[str, Any]:
    key, value = parse_override(override)
    name = ".".join(str(part) for part in key)
    return ("deepspeed" if name == "parallel.shard" else name), value


def _estimated(text: str, gpu: Gpu, gpus: int, shape: ModelShape | None) -> Estimate | None:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_text(text, encoding="utf-8")
        loaded = load_recipe(file)
        recipe = loaded.recipe
    if shape is None:
        return None
    try:
        return estimate(plan_of(recipe, gpus, shape), gpu, replan=replanning(loaded, gpus))
    except ModelError:  # `sft` says what of the recipe the model does not take
        return None


def _too_large(found: Estimate) -> RecipeError:
    others = [f"{each.settings} takes {each.peak_gib:.1f} GiB" for each in found.suggestions]
    return RecipeError(
        f"it needs {found.peak.needed_gib:.1f} GiB of each GPU, {found.gpu.name} has "
        f"{found.gpu.memory_gib:.1f}, and nothing that trains the same weights makes it fit",
        where="--gpu",
        fix="; ".join(["more --gpus, another --method", *others[:2]]),
    )


def _with_header(text: str, model: str, method: str, found: Estimate | None) -> str:
    lines = text.rstrip("\n").split("\n")
    body = next(n for n, line in enumerate(lines) if "yaml-language-server" in line)
    about = [f"# {model}, {METHODS[method]}."]
    if found is not None:
        gpus, gpu = found.plan.gpus, found.gpu.name
        spread = f"--gpu {gpu}" + ("" if gpus == 1 else f" --gpus {gpus}")
        about.append(
            f"# Expected: {found.peak.gib:.1f} GiB of each of {gpus} x {gpu}; `trainkit estimate "
            f"FILE {spread}` says of what."
        )
    return "\n".join([*about, *lines[body:]]) + "\n"
