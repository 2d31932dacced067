"""LLaMA-Factory's recipes, with the data sets that its ``dataset_info.json`` names."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainkit.recipe.translate.draft import Draft, Row, leave, part_of, rows_of, to, words
from trainkit.recipe.translate.rows import four_bit, ignored_when_off, kernels, share_for_eval

SIGNS = ("stage", "finetuning_type", "cutoff_len", "template", "lora_rank", "plot_loss")

_COLUMNS = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "system": "system",
    "messages": "messages",
    "tools": "tools",
}
"""Of ``dataset_info.json``, and what trainkit calls them."""


def dataset(draft: Draft, key: str, value: Any) -> None:
    """Names that ``dataset_info.json`` explains; or else files of that name."""
    target = "data.train" if key == "dataset" else "data.eval"
    folder = Path(str(draft.get("dataset_dir", "data")))
    info = _dataset_info(draft.folder, folder)
    sources, unknown = [], []
    shares = words(draft.get("interleave_probs", []))
    for index, name in enumerate(words(value)):
        found = info.get(name)
        if found is None:
            unknown.append(name)
        source = _source(folder, name, found or {})
        if draft.get("max_samples") and key == "dataset":
            source["max_samples"] = draft.get("max_samples")
        if index < len(shares) and key == "dataset":
            source["weight"] = float(shares[index])
        sources.append(source)
    note = ""
    if unknown:
        note = (
            f"there is no {folder / 'dataset_info.json'} that says which file "
            f"{' and '.join(unknown)} is: look at the path"
        )
    draft.take(key, {target: sources}, note)


def _dataset_info(beside: Path, folder: Path) -> dict[str, Any]:
    for place in (folder, beside / folder, beside.parent / folder, beside.parents[-1] / folder):
        file = place / "dataset_info.json"
        if file.is_file():
            try:
                found = json.loads(file.read_text(encoding="utf-8"))
            except (ValueError, OSError):
                return {}
            return found if isinstance(found, dict) else {}
    return {}


def _source(folder: Path, name: str, info: Mapping[str, Any]) -> dict[str, Any]:
    if info.get("hf_hub_url"):
        source: dict[str, Any] = {"path": info["hf_hub_url"], "name": name}
    else:
        source = {"path": str(folder / info.get("file_name", f"{name}.json"))}
    if info.get("split"):
        source["split"] = info["split"]
    tags = info.get("tags") or {}
    if info.get("formatting") == "sharegpt":
        source["format"] = "messages" if tags.get("role_tag") == "role" else "sharegpt"
    elif info:
        source["format"] = "alpaca"
    columns = {
        _COLUMNS[theirs]: column
        for theirs, column in (info.get("columns") or {}).items()
        if theirs in _COLUMNS and column != _COLUMNS[theirs]
    }
    if columns.get("messages") == "conversations":
        del columns["messages"]
    if columns:
        source["columns"] = columns
    return source


_FREEZE = "write `frozen: ['*', '!24-31']` under model to train layers 24 to 31 alone"


def method(draft: Draft, key: str, value: Any) -> None:
    """LoRA, or all weights."""
    if value in ("lora", "oft"):
        rank = int(draft.get("lora_rank", 8))
        note = "" if value == "lora" else "LoRA instead: trainkit has no OFT"
        alpha = draft.get("lora_alpha", 2 * rank)
        draft.take(key, {"lora.r": rank, "lora.alpha": alpha}, note)
    elif value == "full":
        draft.take(key, {})
    elif value == "freeze":
        freeze(draft, key)
    else:
        draft.leave(key, "here ALL weights train; see model.frozen")


def freeze(draft: Draft, key: str) -> None:
    """The last layers train, of a negative number the first; and what is named besides."""
    if draft.get("use_llama_pro"):
        draft.leave(key, f"here ALL weights train: LLaMA Pro's layers are spread out; {_FREEZE}")
        return
    count = int(draft.get("freeze_trainable_layers", 2))
    layers = f"last-{count}" if count > 0 else f"0-{-count - 1}"
    modules = words(draft.get("freeze_trainable_modules", "all"))
    parts = [layers] if "all" in modules else [f"{layers}.{name}" for name in modules]
    others = words(draft.get("freeze_extra_modules", []))
    draft.take(key, {"model.frozen": ["*", *(f"!{name}" for name in (*parts, *others))]})


def stage(draft: Draft, key: str, value: Any) -> None:
    """``sft`` and ``pt``; others are refused."""
    draft.take(key, {"data.mask": "none" if value == "pt" else "assistant"})


def mask(choice: str) -> Row:
    """A switch that chooses a mask."""

    def row(draft: Draft, key: str, value: Any) -> None:
        if value:
            draft.take(key, {"data.mask": choice})
        else:
            draft.seen.add(key)

    return row


def pissa(draft: Draft, key: str, value: Any) -> None:
    """The start of adapters from the base's largest singular values."""
    if not value:
        draft.seen.add(key)
        return
    turns = draft.get("pissa_iter", 16)
    name = "pissa" if turns == -1 else f"pissa_niter_{turns}"
    draft.take(key, {"lora.init_lora_weights": name})


def thinking(draft: Draft, key: str, value: Any) -> None:
    """Whether a thinking template opens a thought."""
    draft.take(key, {"data.template_kwargs": {"enable_thinking": bool(value)}})


_OPTIMIZERS = {
    "use_galore": "galore_adamw",
    "use_apollo": "apollo_adamw",
    "use_muon": "muon",
}


def optimizer(draft: Draft, key: str, value: Any) -> None:
    """A switch that chooses an optimizer."""
    if not value:
        draft.seen.add(key)
        return
    draft.take(key, {"training.optim": _OPTIMIZERS[key]})
    prefix = key.removeprefix("use_")
    draft.seen.add(key)
    for own in draft.theirs:
        if own.startswith(f"{prefix}_"):
            draft.leave(own, "goes into training.optim_args, or optim_target_modules, by hand")
            draft.seen.add(own)


def blocks(draft: Draft, key: str, value: Any) -> None:
    """BAdam: a block of weights at a time."""
    if value:
        draft.leave(key, "here ALL weights train at once; `optim_in_backward: true` saves memory")
    else:
        draft.seen.add(key)


_PARTS_OF_BADAM = ("mode", "start_block", "switch_mode", "switch_interval", "update_ratio")
_PARTS_OF_FREEZE = (
    "freeze_trainable_layers",
    "freeze_trainable_modules",
    "freeze_extra_modules",
    "use_llama_pro",
)


def freeze_part(draft: Draft, key: str, value: Any) -> None:
    """Read together with ``finetuning_type: freeze``, which has the line."""
    if draft.get("finetuning_type") != "freeze":
        draft.leave(key, "LLaMA-Factory reads it with `finetuning_type: freeze` alone")
    elif key == "use_llama_pro" and value:
        draft.leave(key, "name its layers in model.frozen")


_OWN_TEMPLATE = leave("the tokenizer's own chat template is used, or data.chat_template")

ROWS: Mapping[str, Row] = {
    **rows_of(
        {
            "cutoff_len": "data.max_length",
            "lora_dropout": "lora.dropout",
            "additional_target": "lora.modules_to_save",
            "tokenized_path": "data.cache_dir",
        }
    ),
    "additional_target": to("lora.modules_to_save", words),
    "stage": stage,
    "finetuning_type": method,
    "lora_rank": part_of("finetuning_type"),
    "lora_alpha": part_of("finetuning_type"),
    "pissa_init": pissa,
    "pissa_iter": part_of("pissa_init"),
    "pissa_convert": part_of("pissa_init"),
    "dataset": dataset,
    "eval_dataset": dataset,
    "dataset_dir": part_of("dataset"),
    "max_samples": part_of("dataset"),
    "interleave_probs": part_of("dataset"),
    "mix_strategy": leave("sources are mixed by their weights; an epoch shows every row once"),
    "val_size": share_for_eval,
    "template": _OWN_TEMPLATE,
    "overwrite_cache": leave("the cache knows when a file, the template or a setting changed"),
    "train_on_prompt": mask("none"),
    "mask_history": mask("last_assistant"),
    "packing": to("data.packing"),
    "neat_packing": to("data.packing"),
    "quantization_bit": lambda draft, key, value: (
        four_bit(draft, key, value)
        if value in (0, 4)
        else draft.leave(key, "a frozen base is kept in 4 bits (nf4) or fp8")
    ),
    "quantization_method": part_of("quantization_bit"),
    "double_quantization": part_of("quantization_bit"),
    "enable_thinking": thinking,
    "enable_liger_kernel": kernels,
    "use_unsloth": kernels,
    "use_unsloth_gc": ignored_when_off("lora.offload_activations does it"),
    "flash_attn": leave("the fastest attention that isolates packed samples is found by itself"),
    "attn": leave("the fastest attention that isolates packed samples is found by itself"),
    "pure_bf16": lambda draft, key, value: (
        draft.take(key, {"model.dtype": "bfloat16"}, "the optimizer keeps float32 copies here")
        if value
        else draft.seen.add(key)
    ),
    "early_stopping_steps": to("early_stopping.patience"),
    "plot_loss": leave("the curves are always drawn"),
    "rope_scaling": leave("the model's own config says how its positions are scaled"),
    **dict.fromkeys(_OPTIMIZERS, optimizer),
    "disable_gradient_checkpointing": lambda draft, key, value: draft.take(
        key, {"training.gradient_checkpointing": not value}
    ),
    **dict.fromkeys(_PARTS_OF_FREEZE, freeze_part),
    "use_badam": blocks,
    **dict.fromkeys((f"badam_{part}" for part in _PARTS_OF_BADAM), part_of("use_badam")),
    "add_tokens": to("model.add_tokens", words),
    "add_special_tokens": to("model.add_special_tokens", words),
    "new_special_tokens": to("model.add_special_tokens", words),
    "new_special_tokens_config": leave(
        "list its tokens in model.add_special_tokens: each begins as the mean of its pieces"
    ),
    "resize_vocab": leave("model.add_tokens resizes what it has to"),
}

DEFAULTS: Mapping[str, Any] = {
    "data.packing": False,
    "training.gradient_checkpointing": True,
}
"""What LLaMA-Factory does where nobody says so, and trainkit would not."""

CHANGED: Mapping[str, str] = {
    "data.truncation": "LLaMA-Factory shortens prompt and answer of a row that is too long",
}
"""Where trainkit's default stays, and what LLaMA-Factory does instead."""


def assumed(theirs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Keys of its own that it takes as given."""
    return {"finetuning_type": "lora"}


def refuse(theirs: Mapping[str, Any]) -> str | None:
    """Why a recipe is none of ours."""
    if theirs.get("stage", "sft") not in ("sft", "pt"):
        return f"`stage: {theirs['stage']}` is not supervised fine-tuning"
    if theirs.get("do_train") is False or (theirs.get("do_predict") and not theirs.get("do_train")):
        return "it predicts and does not train"
    return None
