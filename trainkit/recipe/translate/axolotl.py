"""axolotl's recipes."""

import re
from collections.abc import Mapping
from typing import Any

from trainkit.options.optimizers import SERVED, served_as
from trainkit.recipe.translate.draft import Draft, Row, leave, part_of, rows_of, to, words
from trainkit.recipe.translate.rows import (
    checkpointing,
    cut,
    ignored_when_off,
    kernels,
    share_for_eval,
)

SIGNS = ("base_model", "micro_batch_size", "sequence_len", "sample_packing", "adapter")

FORMATS = {
    "alpaca": "alpaca",
    "chat_template": "auto",
    "sharegpt": "sharegpt",
    "completion": "text",
    "input_output": "auto",
}
"""Of ``datasets[].type``."""

_OF_A_SOURCE = {"path", "type", "split", "data_files", "ds_type", "field_messages", "name"}
_SAID_BY_FORMAT = {"message_property_mappings", "message_field_role", "message_field_content"}
_COLUMNS = {
    "field_system": "system",
    "field_instruction": "instruction",
    "field_input": "input",
    "field_output": "output",
}
"""Of a ``type`` that is written out, and what trainkit calls them."""


def datasets(draft: Draft, key: str, value: Any) -> None:
    """Sources of conversations; a test set is one, too."""
    target = "data.eval" if key == "test_datasets" else "data.train"
    sources, notes = [], []
    for each in value if isinstance(value, list) else [value]:
        given = each if isinstance(each, dict) else {"path": each}
        source, note = _source(given)
        sources += source
        notes += note
    draft.take(key, {target: sources}, "; ".join(dict.fromkeys(notes)))


def _source(given: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    notes = []
    kind = given.get("type")
    source: dict[str, Any] = {"path": str(given.get("path"))}
    if given.get("split"):
        source["split"] = given["split"]
    name = kind if isinstance(kind, str) else None
    form = FORMATS.get((name or "").partition(".")[0])
    if isinstance(kind, dict) and kind.keys() & _COLUMNS.keys():
        form = "alpaca"
        source["columns"] = {_COLUMNS[key]: kind[key] for key in _COLUMNS if kind.get(key)}
        own = sorted(kind.keys() - _COLUMNS.keys())
        if own:
            notes.append(f"its {', '.join(own)} are not used: the model's chat template is")
    if form is None:
        shown = name or "of its own"
        notes.append(f"rows of type {shown} are read by what they look like: see `--dry-run`")
    elif form != "auto":
        source["format"] = form
    roles = given.get("message_property_mappings") or {}
    if roles.get("role") == "from" or given.get("message_field_role") == "from":
        source["format"] = "sharegpt"
    named = {
        "role": given.get("message_field_role", roles.get("role", "role")),
        "content": given.get("message_field_content", roles.get("content", "content")),
    }
    strange = [name for name in named.values() if name not in ("role", "content", "from", "value")]
    if strange:
        notes.append(
            f"messages with {' and '.join(strange)} are not read: rename them to role and content"
        )
    field = given.get("field_messages")
    if field and field not in ("messages", "conversations"):
        source["columns"] = {"messages": field}
    if given.get("roles_to_train"):
        source["roles"] = words(given["roles_to_train"])
    rest = set(given) - _OF_A_SOURCE - _SAID_BY_FORMAT - {"roles_to_train"}
    if given.get("name"):
        notes.append(f"the subset {given['name']} of {source['path']} is not chosen")
    if rest:
        notes.append(f"{', '.join(sorted(rest))} of a data set has no key here")
    if given.get("data_files"):
        return [{**source, "path": file} for file in words(given["data_files"])], notes
    return [source], notes


def adapter(draft: Draft, key: str, value: Any) -> None:
    """``lora`` and ``qlora``."""
    if value not in ("lora", "qlora"):
        draft.leave(key, "adapters are LoRA's; without a `lora:` section all weights are trained")
        return
    draft.seen.add(key)
    draft.take(f"adapter: {value}", {"lora.r": draft.get("lora_r", 8)})
    if value == "qlora":
        draft.take("adapter: qlora", {"lora.quantize": "nf4"})


def inputs(draft: Draft, key: str, value: Any) -> None:
    """Whether the prompts are trained, too."""
    draft.take(key, {"data.mask": "none" if value else "assistant"})


def per_epoch(strategy: str, steps: str, needs_eval: bool) -> Row:
    """So many times an epoch: a share of all steps here."""

    def row(draft: Draft, key: str, value: Any) -> None:
        has_eval = draft.get("val_set_size") or draft.get("test_datasets")
        if needs_eval and not has_eval:
            draft.leave(key, "there is nothing to evaluate on")
        elif value == 0:
            draft.take(key, {f"training.{strategy}": "no"})
        elif value == 1:
            draft.take(key, {f"training.{strategy}": "epoch"})
        else:
            share = 1 / (value * float(draft.get("num_epochs", 1)))
            ours = {f"training.{strategy}": "steps", f"training.{steps}": round(share, 6)}
            draft.take(key, ours, "a share of all steps")

    return row


def schedule(draft: Draft, key: str, value: Any) -> None:
    """The cosine has a floor where ``cosine_min_lr_ratio`` says so."""
    floor = draft.get("cosine_min_lr_ratio")
    if value == "cosine" and floor:
        ours = {"training.lr_scheduler_type": "cosine_with_min_lr"}
        draft.take(key, {**ours, "training.lr_scheduler_kwargs": {"min_lr_rate": floor}})
    else:
        draft.take(key, {"training.lr_scheduler_type": value})


def plugins(draft: Draft, key: str, value: Any) -> None:
    """Liger and cut cross entropy are kernels."""
    fast = [name for name in words(value) if "liger" in name.lower() or "cross_entropy" in name]
    if fast:
        kernels(draft, key, True)
    others = [name for name in words(value) if name not in fast]
    if others:
        draft.leave(f"plugins: {', '.join(others)}", "trainkit has no plugins")


def trained_names(draft: Draft, key: str, value: Any) -> None:
    """Name patterns of the weights that train."""
    if draft.get("adapter"):
        draft.leave(key, "under adapters nothing else trains; lora.modules_to_save adds modules")
        return
    names = [_as_glob(str(each)) for each in value]
    if None in names:
        why = "here ALL weights train: model.frozen takes names with *, no expressions like these"
        draft.leave(key, why)
    else:
        draft.take(key, {"model.frozen": ["*", *(f"!{name}" for name in names)]})


def _as_glob(expression: str) -> str | None:
    """A simple regular expression as a name with ``*``; None of one that is not."""
    plain = expression.removeprefix("^").removesuffix("$").replace("\\.", ".")
    plain = plain.replace(".*", "*")
    if re.search(r"[\\\[\](){}+?|^$]", plain):
        return None
    return plain if expression.endswith("$") or plain.endswith("*") else f"{plain}*"


_KERNEL = kernels
_AUTO = leave("the fastest attention that isolates packed samples is found by itself")
_TRACKER = leave("set WANDB_PROJECT and the like, and `report_to: wandb`")

ROWS: Mapping[str, Row] = {
    **rows_of(
        {
            "base_model": "model.name_or_path",
            "revision_of_model": "model.revision",
            "sequence_len": "data.max_length",
            "sample_packing": "data.packing",
            "micro_batch_size": "training.per_device_train_batch_size",
            "eval_batch_size": "training.per_device_eval_batch_size",
            "num_epochs": "training.num_train_epochs",
            "dataset_prepared_path": "data.cache_dir",
            "dataset_processes": "data.num_workers",
            "peft_use_dora": "lora.use_dora",
            "peft_use_rslora": "lora.use_rslora",
            "peft_init_lora_weights": "lora.init_lora_weights",
            "noisy_embedding_alpha": "training.neftune_noise_alpha",
        }
    ),
    "lr_scheduler": schedule,
    "optimizer": to("training.optim", lambda name: served_as(str(name), SERVED) or name),
    "cosine_min_lr_ratio": part_of("lr_scheduler"),
    "excess_length_strategy": cut({"drop": "drop", "truncate": "right", "raise": "error"}),
    "datasets": datasets,
    "test_datasets": datasets,
    "val_set_size": share_for_eval,
    "adapter": adapter,
    "lora_r": part_of("adapter"),
    "lora_target_linear": lambda draft, key, value: (
        draft.take(key, {"lora.target_modules": "all-linear"}) if value else draft.seen.add(key)
    ),
    "lora_fan_in_fan_out": ignored_when_off("only GPT-2's layers are stored transposed"),
    "train_on_inputs": inputs,
    "evals_per_epoch": per_epoch("eval_strategy", "eval_steps", True),
    "saves_per_epoch": per_epoch("save_strategy", "save_steps", False),
    "gradient_checkpointing": checkpointing,
    "plugins": plugins,
    "unfrozen_parameters": trained_names,
    "wandb_project": _TRACKER,
    "wandb_entity": _TRACKER,
    "wandb_name": to("training.run_name"),
    "flash_attention": _AUTO,
    "xformers_attention": _AUTO,
    "sdp_attention": _AUTO,
    "eager_attention": _AUTO,
    "flex_attention": _AUTO,
    "flash_attn_cross_entropy": _KERNEL,
    "flash_attn_rms_norm": _KERNEL,
    "flash_attn_fuse_qkv": ignored_when_off(),
    "flash_attn_fuse_mlp": ignored_when_off(),
    "lora_mlp_kernel": _KERNEL,
    "lora_qkv_kernel": _KERNEL,
    "lora_o_kernel": _KERNEL,
    "chat_template": leave("the tokenizer's own is used, or the file in data.chat_template"),
    "eot_tokens": leave("the chat template says what ends a turn; it is trained"),
    "special_tokens": leave("the tokenizer's own tokens are used"),
    "tokens": to("model.add_tokens"),
    "pad_to_sequence_len": leave("packed batches are padded to one length by themselves"),
    "eval_sample_packing": leave("evaluation packs as training does"),
    "is_llama_derived_model": leave("the model's class is read from its config"),
    "model_type": leave("the model's class is read from its config"),
    "tokenizer_type": leave("the tokenizer's class is read from its files"),
    "strict": ignored_when_off(),
    "debug": ignored_when_off(),
    "early_stopping_patience": to("early_stopping.patience"),
    "loss_watchdog_threshold": leave("a loss that is not finite stops the run by itself"),
    "loss_watchdog_patience": leave("a loss that is not finite stops the run by itself"),
}

DEFAULTS: Mapping[str, Any] = {
    "data.packing": False,
    "data.max_length": 512,
    "data.truncation": "drop",
    "training.num_train_epochs": 1,
}
"""What axolotl does where nobody says so, and trainkit would not."""

CHANGED: Mapping[str, str] = {}
"""Where trainkit's default stays, and what axolotl does instead."""


def assumed(theirs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Keys of its own that it takes as given."""
    return {}


def refuse(theirs: Mapping[str, Any]) -> str | None:
    """Why a recipe is none of ours."""
    return f"`rl: {theirs['rl']}` is preference learning" if theirs.get("rl") else None
