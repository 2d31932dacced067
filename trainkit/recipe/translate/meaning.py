"""Settings of other tools that are read together: each step takes some words of a draft."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from trainkit.options.optimizers import FSDP2, OPTIMIZERS, SERVED, ZERO, served_as
from trainkit.recipe.translate.draft import OFF, Draft, words
from trainkit.recipe.translate.read import beside
from trainkit.recipe.translate.sources import data

Rows = Mapping[str, Any]
_LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def model(draft: Draft, rows: Rows) -> None:
    """Which model, and what its weights are held in."""
    name = draft.ours.get("model.name_or_path")
    if not isinstance(name, str):
        draft.lose("model.name_or_path", "no base model is named, which trainkit starts from")
        draft.ours["model.name_or_path"] = "MODEL"
    for key in ("hub", "trust"):
        draft.said.update(draft.keys.get(key, ()))
    if draft.on("trust"):
        draft.leave(
            "trust", "code that comes with a model runs with `model: {trust_remote_code: true}`"
        )
    half = str(draft.get("dtype", "")).removeprefix("torch.")
    if draft.on("bf16") or half in ("bfloat16", "auto"):
        kind = "bfloat16"
    elif draft.on("fp16") or half in ("float16", "half"):
        kind = "float16"
    else:
        kind = (
            "float32" if rows.get("plain_dtype") == "float32" or half == "float32" else "bfloat16"
        )
    draft.take("bf16 fp16 dtype", {"model.dtype": kind})
    if draft.on("fp8"):
        if draft.get("method", "full") == "full":
            note = "as far as the loss bears it; `all` takes every product"
            draft.take("fp8", {"model.fp8": True}, note)
        else:
            draft.lose("fp8", "under adapters `lora: {quantize: fp8}` keeps the base in fp8")


def method(draft: Draft, rows: Rows) -> None:
    """All weights, some, or adapters; and what a frozen base is kept in."""
    kind = str(draft.get("method", "full")).lower()
    if draft.on("bits16"):
        draft.theirs["load_in_4bit"] = False
    if draft.on("full"):
        kind = "full"
        draft.theirs["load_in_4bit"] = draft.given.get("load_in_4bit", False)
    kind = {"true": "lora", "qlora": "lora", "false": "full", "none": "full"}.get(kind, kind)
    if kind not in ("lora", "full", "freeze"):
        draft.lose("method", "trainkit trains all weights, some of them, or LoRA")
    if kind == "lora":
        rank = int(draft.get("lora.r") or rows.get("rank", 8))
        alpha = draft.get("lora.alpha") or rows.get("alpha", 2) * (
            1 if rows.get("alpha", 2) > 8 else rank
        )
        draft.take("method lora.r lora.alpha", {"lora.r": rank, "lora.alpha": alpha})
        _targets(draft, rows)
        _base(draft)
        return
    for key in [key for key in draft.ours if key.startswith("lora.")]:
        del draft.ours[key]
        draft.lines = [line for line in draft.lines if not line.ours.startswith(f"{key}: ")]
    lora = [word for word in draft.keys if word.startswith("lora.")]
    adapters = [
        key for word in (*lora, "targets", "targets_linear") for key in draft.keys.get(word, ())
    ]
    for key in adapters:
        if key in draft.given:
            draft.leave(key, "adapters are off, so it does nothing")
    if draft.on("bits4") or draft.on("bits8"):
        draft.lose("bits4 bits8", "a base in 4 or 8 bits trains under adapters alone")
    draft.take("method", {})
    if kind == "freeze":
        _freeze(draft)
    elif draft.on("unfrozen"):
        names = [_as_glob(str(each)) for each in words(draft.get("unfrozen"))]
        if None in names:
            draft.lose("unfrozen", "model.frozen takes names with *, no expressions like these")
        else:
            draft.take("unfrozen", {"model.frozen": ["*", *(f"!{name}" for name in names)]})


def _as_glob(expression: str) -> str | None:
    """A simple regular expression as a name with ``*``; None of one that is not."""
    plain = expression.removeprefix("^").removesuffix("$").replace("\\.", ".").replace(".*", "*")
    if re.search(r"[\\\[\](){}+?|^$]", plain):
        return None
    return plain if expression.endswith("$") or plain.endswith("*") else f"{plain}*"


def _freeze(draft: Draft) -> None:
    """The last layers train, of a negative number the first; and what is named besides."""
    if draft.on("llama_pro"):
        draft.lose("llama_pro", "LLaMA Pro adds layers to the model and trains those")
    count = int(draft.get("trainable_layers", 2))
    layers = f"last-{count}" if count > 0 else f"0-{-count - 1}"
    modules = words(draft.get("trainable_modules", "all"))
    parts = [layers] if "all" in modules else [f"{layers}.{name}" for name in modules]
    names = ["*", *(f"!{name}" for name in (*parts, *words(draft.get("extra_modules"))))]
    draft.take("method trainable_layers trainable_modules extra_modules", {"model.frozen": names})


def _targets(draft: Draft, rows: Rows) -> None:
    if draft.on("unfrozen"):
        draft.leave("unfrozen", "under adapters the base stays frozen")
    given = draft.get("targets")
    if draft.on("targets_linear") or given in ("all", "all-linear", ["all"], ["all-linear"]):
        more = set(words(given)) - {"all", "all-linear"} if not isinstance(given, str) else set()
        draft.take("targets targets_linear", {"lora.target_modules": "all-linear"})
        if more - _LINEAR:
            draft.lose("targets", "all linear layers, and others by name, cannot be had together")
    elif isinstance(given, str) and re.search(r"[\\\[\]()|*+?^$]", given):
        draft.take("targets", {"lora.target_modules": given})
    elif given not in OFF:
        names = words(given)
        if not set(names) & {"all", "all-linear"}:
            draft.take("targets", {"lora.target_modules": names})
        else:
            draft.lose("targets", "all linear layers, and others by name, cannot be had together")
    elif draft.on("lora.target_parameters"):
        draft.take("targets", {"lora.target_modules": []})
    else:
        name = str(draft.get("model.name_or_path"))
        table = rows.get("default_targets", {})
        own = next((to for sign, to in table.items() if re.search(sign, name)), None)
        if own:
            draft.take("targets", {"lora.target_modules": own})
        else:
            draft.lose(
                "targets", f"{draft.tool} names no layers, and peft knows none for this model"
            )
    if "lora.modules_to_save" in draft.ours:
        draft.ours["lora.modules_to_save"] = words(draft.ours["lora.modules_to_save"])


def _base(draft: Draft) -> None:
    """In how many bits a frozen base is kept."""
    if draft.on("bits4") or draft.get("bits") in (4, "4"):
        if draft.get("bits_kind", "nf4") != "nf4":
            draft.lose("bits_kind", "a 4-bit base is nf4")
        if draft.get("bits_method", "bnb") not in ("bnb", "bitsandbytes"):
            draft.lose("bits_method", "a base is quantised by bitsandbytes' nf4 alone")
        draft.take("bits4 bits bits_method bits_kind", {"lora.quantize": "nf4"})
    elif draft.on("bits8") or draft.on("bits"):
        why = "a base in int8; `nf4` keeps it in 4 bits, `fp8` in 8 on a GPU that has them"
        draft.lose("bits8 bits bits_method", why)
    else:
        draft.take("bits4 bits8 bits", {})


def batches(draft: Draft, rows: Rows) -> None:
    """Rows a step and a pass, and of an evaluation."""
    rows_here = draft.ours.get("training.per_device_train_batch_size")
    rows_here = rows_here or draft.get("training.per_device_train_batch_size", rows.get("micro", 8))
    total = draft.get("total_batch")
    if total and rows.get("total_is_global"):
        draft.take("total_batch", {"global_batch_size": total})
    elif total and draft.get("training.gradient_accumulation_steps") is None:
        if "gradient_accumulation_steps" in draft.given:
            draft.leave("total_batch", "gradient_accumulation_steps is given, and wins")
        else:
            steps = max(int(total) // int(rows_here), 1)
            draft.take("total_batch", {"training.gradient_accumulation_steps": steps})
    if rows.get("eval_batch_is_micro"):
        size = draft.get("eval_batch", rows_here)
        draft.take("eval_batch", {"training.per_device_eval_batch_size": size})


def schedule(draft: Draft, rows: Rows) -> None:
    """The rate's course, its warm-up, and the optimizer."""
    kind, floor = draft.get("schedule"), draft.get("cosine_floor")
    if kind in ("rex", "one_cycle"):
        draft.lose("schedule", "a course of the rate that is axolotl's own")
    elif kind is not None and floor and str(kind) == "cosine":
        ours = {"training.lr_scheduler_type": "cosine_with_min_lr"}
        more = {"training.lr_scheduler_kwargs": {"min_lr_rate": float(floor)}}
        draft.take("schedule cosine_floor", {**ours, **more})
    elif kind is not None:
        draft.take("schedule", {"training.lr_scheduler_type": kind})
    steps, share = draft.get("warmup_steps"), draft.get("warmup_ratio")
    if draft.ours.get("training.lr_scheduler_type") == "constant":
        draft.leave("warmup_steps warmup_ratio", "a constant rate has no warm-up")
    elif steps is not None and (float(steps) or not share):
        steps = 2 if rows.get("one_step_is_two") and steps == 1 else steps
        draft.take("warmup_steps", {"training.warmup_steps": steps})
        if share:
            draft.leave("warmup_ratio", "warmup_steps is given, and wins")
    elif share is not None:
        draft.take("warmup_ratio warmup_steps", {"training.warmup_steps": float(share)})
    elif rows.get("warmup"):
        most = draft.get("max_steps")
        least = rows["warmup"]["at_most"]
        steps = min(int(rows["warmup"]["share"] * int(most)), least) if most else None
        steps = 2 if steps == 1 else steps
        note = "" if steps is not None else f"there at most {least} steps: in a run of more than "
        note += (
            ""
            if steps is not None
            else f"{round(least / rows['warmup']['share'])} write warmup_steps: {least}"
        )
        share = rows["warmup"]["share"]
        draft.take(
            "warmup_steps", {"training.warmup_steps": share if steps is None else steps}, note
        )
    name = draft.ours.get("training.optim")
    if name is not None:
        served = served_as(str(name), SERVED)
        draft.ours["training.optim"] = served or name
    if isinstance(draft.ours.get("training.optim_args"), dict):
        pairs = draft.ours["training.optim_args"].items()
        draft.ours["training.optim_args"] = ",".join(f"{key}={value}" for key, value in pairs)
    if draft.on("group_by_length") and not draft.ours.get("data.packing"):
        draft.take("group_by_length", {"training.train_sampling_strategy": "group_by_length"})
    if draft.on("disable_shuffling"):
        draft.take("disable_shuffling", {"training.train_sampling_strategy": "sequential"})


def evaluation(draft: Draft, rows: Rows) -> None:
    """How often it evaluates and saves."""
    has_eval = draft.on("eval_share") or "data.eval" in draft.ours
    epochs = float(draft.ours.get("training.num_train_epochs") or 1)
    if rows.get("per_epoch"):
        for word, kind in (("evals_per_epoch", "eval"), ("saves_per_epoch", "save")):
            count = draft.get(word)
            share = 1 / (float(count) * epochs) if count else 0
            given = draft.ours.get(f"training.{kind}_steps")
            if kind == "eval" and not has_eval:
                for name in ("eval_strategy", "eval_steps"):
                    draft.ours.pop(f"training.{name}", None)
                draft.take(word, {})
            elif 0 < share < 1 or given:
                every = given or round(share, 6)
                ours = {f"training.{kind}_strategy": "steps", f"training.{kind}_steps": every}
                if kind == "eval":
                    ours["training.eval_on_start"] = True
                draft.take(word, ours)
            elif f"training.{kind}_strategy" in draft.ours:
                if kind == "eval":
                    draft.take(word, {"training.eval_on_start": True})
            else:
                default = "epoch" if kind == "save" else "no"
                draft.take(word, {f"training.{kind}_strategy": default})
        if draft.ours.get("training.save_strategy") == "best":
            draft.ours.setdefault("training.metric_for_best_model", "eval_loss")
    elif has_eval and rows.get("eval_follows_saves"):
        kind = draft.ours.get("training.eval_strategy") or draft.ours.get(
            "training.save_strategy", "steps"
        )
        every = draft.ours.get("training.eval_steps") or draft.ours.get("training.save_steps", 500)
        ours = {"training.eval_strategy": kind}
        draft.take(
            "eval_strategy", ours | ({"training.eval_steps": every} if kind == "steps" else {})
        )
    elif not has_eval:
        for name in ("eval_strategy", "eval_steps"):
            if draft.ours.pop(f"training.{name}", None) not in (None, "no"):
                draft.lines = [e for e in draft.lines if not e.ours.startswith(f"training.{name}")]
                draft.leave(name, "there is nothing to evaluate on")
    if draft.ours.get("training.save_total_limit") == -1:
        draft.ours["training.save_total_limit"] = None  # all are kept
    if "early_stopping.patience" in draft.ours:
        draft.ours.setdefault("training.metric_for_best_model", "eval_loss")


def sharding(draft: Draft, rows: Rows) -> None:
    """DeepSpeed, FSDP of either form, and accelerate's file."""
    config = draft.launcher.get("config_file")
    settings: dict[str, Any] = {}
    if config:
        file = beside(draft.folder / "x", str(config))
        if file is None:
            draft.lose(f"--config_file {config}", "accelerate's file is not there to be read")
            return
        settings = dict(yaml.safe_load(file.read_text(encoding="utf-8")) or {})
    shard = str(draft.get("deepspeed") or "")
    kind = str(settings.get("distributed_type", "")).upper()
    own = settings.get("deepspeed_config") or {}
    if kind == "DEEPSPEED":
        if own.get("deepspeed_config_file"):
            shard = own["deepspeed_config_file"]
        else:
            devices = (own.get("offload_optimizer_device"), own.get("offload_param_device"))
            off = any(each not in (None, "none") for each in devices)
            shard = f"zero{own.get('zero_stage', 0)}" + ("_offload" if off else "")
    said = f"--config_file {config}" if kind in ("DEEPSPEED", "FSDP") else "deepspeed"
    if shard:
        _deepspeed(draft, said, shard)
        return
    fsdp = draft.get("fsdp_config") or settings.get("fsdp_config") or {}
    if kind == "FSDP" or draft.on("fsdp") or draft.on("fsdp_config") or draft.on("fsdp_version"):
        said = said if kind == "FSDP" else "fsdp fsdp_config fsdp_version"
        fsdp = fsdp if isinstance(fsdp, dict) else {}
        flat = {str(key).removeprefix("fsdp_"): value for key, value in fsdp.items()}
        strategy = str(flat.get("sharding_strategy", draft.get("fsdp"))).upper()
        offload = flat.get("offload_params") in (True, "true") or "offload" in str(
            draft.get("fsdp")
        )
        note = "zero3_offload holds the shards in host memory: FSDP2 here has no offload"
        ours: dict[str, Any] = {"parallel.shard": "zero3_offload" if offload else "fsdp2"}
        if "SHARD_GRAD_OP" in strategy and not offload:
            ours, note = {"parallel.shard": "zero2"}, "the same shards: of gradients and optimizer"
        elif "NO_SHARD" in strategy or "HYBRID" in strategy:
            note = f"{strategy.lower()} holds more copies; here each GPU has one shard"
        elif not offload:
            note = ""
        if flat.get("activation_checkpointing") in (True, "true"):
            ours["training.gradient_checkpointing"] = True
        known = OPTIMIZERS.get(str(draft.ours.get("training.optim")))
        alone = known is not None and FSDP2 not in known.shards and ZERO in known.shards
        if ours["parallel.shard"] == "fsdp2" and alone:
            ours["parallel.shard"] = "zero3"
            note = "the same shards: FSDP2 cannot hold this optimizer's states"
        draft.take(said, ours, note)
    elif config:
        draft.leave(
            f"--config_file {config}", "no sharding in it; `trainkit launch` starts processes"
        )


def _deepspeed(draft: Draft, said: str, name: str) -> None:
    file = beside(draft.folder / "x", name) if name.endswith(".json") else None
    if file is not None:
        stage = json.loads(file.read_text(encoding="utf-8")).get("zero_optimization", {})
        level = int(stage.get("stage", 0))
        offload = any(
            (stage.get(f"offload_{part}") or {}).get("device", "none") != "none"
            for part in ("optimizer", "param")
        )
    else:
        found = re.search(r"(?:zero|z|stage)_?([0-3])", name.rpartition("/")[2].lower())
        if found is None:
            draft.lose(said, "this DeepSpeed file is not there to be read")
            return
        level, offload = int(found[1]), "offload" in name.lower()
    shard = f"zero{level}" if level else "none"
    if offload and level == 3:
        shard = "zero3_offload"
    elif offload:
        if file is None:
            draft.lose(said, f"{shard} with the optimizer in host memory: give its file")
            return
        shard = str(file)
    note = "" if file is None or shard == str(file) else "trainkit's own file of that stage"
    draft.take(said, {"parallel.shard": shard}, note)


def checkpointing(draft: Draft, rows: Rows) -> None:
    """Recomputation of activations."""
    if draft.on("no_checkpointing"):
        draft.take("no_checkpointing checkpointing", {"training.gradient_checkpointing": False})
        return
    value = draft.get("checkpointing")
    if value is not None:
        if not draft.ours.get("training.gradient_checkpointing"):
            draft.take("checkpointing", {"training.gradient_checkpointing": value not in OFF})
        if isinstance(value, str) and value not in OFF and value != "true":
            draft.leave("checkpointing", "lora.offload_activations decides about host memory")


def others(draft: Draft, rows: Rows) -> None:
    """Trackers, plugins, tokens."""
    if draft.on("buffer") and draft.ours.get("data.streaming"):
        draft.take("buffer", {"data.streaming": int(draft.get("buffer"))})
    trackers = [
        key.removeprefix("use_")
        for key in draft.keys.get("tracker", ())
        if draft.theirs.get(key) not in OFF
    ]
    named = [name for name in words(draft.get("report_to")) if name not in ("none", "all")]
    if names := [*named, *trackers]:
        served = [name for name in names if name in rows["trackers"]]
        ours = {"training.report_to": served if len(served) > 1 else "".join(served) or "none"}
        draft.take("report_to tracker", ours)
    else:
        draft.take("report_to tracker", {})
    for name in words(draft.get("plugins")):
        if re.search(r"[Ll]iger|cut_cross|KernelsPlugin|ExpertParallel|[Ss]wan", name):
            draft.leave("plugins", "trainkit has kernels of its own, checked against plain torch")
        else:
            draft.lose("plugins", "it changes the training in a way of its own")
    given = draft.get("special_tokens") or {}
    own = table_of_tokens(rows, str(draft.get("model.name_or_path")))
    changed = {
        key: value
        for key, value in given.items()
        if key not in ("pad_token", "unk_token") and value not in (None, own.get(key))
    }
    if changed:
        draft.lose("special_tokens", "here the tokenizer's own begin and end texts")
    elif given:
        draft.leave("special_tokens", "pads are never trained, and the rest is the tokenizer's own")
    tokens = draft.get("tokens")
    if (
        isinstance(tokens, dict)
        and not {**tokens, **own, "pad_token": 0}.items()
        - {**own, **tokens, "pad_token": 0}.items()
    ):
        draft.leave("tokens", "they are the tokenizer's own")
    elif isinstance(tokens, dict):
        draft.lose("tokens", "here the tokenizer's own begin and end texts")
    elif tokens:
        draft.take("tokens", {"model.add_tokens": words(tokens)})
    draft.ours.setdefault("kernels", True)
    draft.origins.setdefault("kernels", "trainkit's kernels, each checked against plain torch")


def table_of_tokens(rows: Rows, name: str) -> Mapping[str, str]:
    """The tokens that a model's tokenizer brings, as far as the table has it."""
    found = (tokens for sign, tokens in rows.get("own_tokens", {}).items() if re.search(sign, name))
    return next(found, {})


STEPS: tuple[Callable[[Draft, Rows], None], ...] = (
    model, method, batches, schedule, data, evaluation, sharding, checkpointing, others,
)  # fmt: skip
