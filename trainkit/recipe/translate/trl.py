"""TRL's ``sft`` arguments and scripts."""

from collections.abc import Mapping
from typing import Any

from trainkit.recipe.translate.draft import Draft, Row, leave, part_of, rows_of
from trainkit.recipe.translate.rows import cut, ignored_when_off

SIGNS = ("dataset_name", "use_peft", "model_name_or_path", "assistant_only_loss", "SFTTrainer")


def dataset(draft: Draft, key: str, value: Any) -> None:
    """One data set, its splits apart."""
    source: dict[str, Any] = {"path": str(value)}
    split = draft.get("dataset_train_split", draft.get("split"))
    if split and split != "train":
        source["split"] = str(split)
    subset = draft.get("dataset_config", draft.get("dataset_config_name"))
    note = f"its subset {subset} is not chosen" if subset else ""
    ours: dict[str, Any] = {"data.train": [source]}
    if draft.get("eval_strategy", "no") != "no":
        test = draft.get("dataset_test_split", "test")
        ours["data.eval"] = [{"path": str(value), "split": str(test)}]
    draft.take(key, ours, note)


def adapters(draft: Draft, key: str, value: Any) -> None:
    """Whether there are adapters, with TRL's defaults."""
    if not value:
        draft.seen.add(key)
        return
    ours = {"lora.r": 16, "lora.alpha": 32, "lora.dropout": 0.05}
    draft.take(key, ours)


def only_answers(draft: Draft, key: str, value: Any) -> None:
    """Whether the answers alone are trained: of conversations, or of prompts and completions."""
    either = draft.get("assistant_only_loss") or draft.get("completion_only_loss")
    if not value and either:
        draft.seen.add(key)
    else:
        draft.take(key, {"data.mask": "assistant" if value else "none"})


def bias(draft: Draft, key: str, value: Any) -> None:
    """Biases of the base do not train."""
    if value in (None, "none"):
        draft.seen.add(key)
    else:
        draft.leave(key, "biases of the base stay as they are")


def chat_template(draft: Draft, key: str, value: Any) -> None:
    """A file with a template, or the tokenizer that has it."""
    if str(value).endswith((".jinja", ".jinja2", ".j2")):
        draft.take(key, {"data.chat_template": str(value)})
    else:
        draft.leave(key, "write that tokenizer's template into a file for data.chat_template")


ROWS: Mapping[str, Row] = {
    **rows_of({"pretrained_model_name_or_path": "model.name_or_path", "r": "lora.r"}),
    "dataset_name": dataset,
    "dataset_train_split": part_of("dataset_name"),
    "dataset_test_split": part_of("dataset_name"),
    "dataset_config": part_of("dataset_name"),
    "use_peft": adapters,
    "assistant_only_loss": only_answers,
    "completion_only_loss": only_answers,
    "bias": bias,
    "task_type": leave("it is always causal language modelling"),
    "lora_task_type": leave("it is always causal language modelling"),
    "eos_token": leave("the chat template says what ends a turn; it is trained"),
    "chat_template_path": chat_template,
    "dataset_text_field": leave("rows are read by what they look like, or by data.format"),
    "dataset_kwargs": ignored_when_off(),
    "truncation_mode": cut({"keep_start": "right"}),
    "packing_strategy": leave("whole conversations are packed, the best fit first"),
    "padding_free": ignored_when_off("`packing: true` leaves no padding either"),
    "eval_packing": leave("evaluation packs as training does"),
    "bnb_4bit_quant_type": leave("a 4-bit base is nf4"),
    "use_bnb_nested_quant": ignored_when_off("a 4-bit base keeps its scales in float32"),
    "push_to_hub": lambda draft, key, value: draft.take(key, {"training.push_to_hub": bool(value)}),
}

DEFAULTS: Mapping[str, Any] = {
    "data.packing": False,
    "data.max_length": 1024,
    "training.learning_rate": 2e-5,
    "training.gradient_checkpointing": True,
    "training.logging_steps": 10,
}
"""What TRL does where nobody says so, and trainkit would not."""

CHANGED: Mapping[str, str] = {
    "data.truncation": "TRL cuts a row at max_length, in an answer too; `truncation: right` does",
    "data.mask": "of a conversation TRL trains every token unless told so; `mask: none` does",
}
"""Where trainkit's default stays, and what TRL does instead."""


def assumed(theirs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Keys of its own that it takes as given."""
    return {}


def refuse(theirs: Mapping[str, Any]) -> str | None:
    """Why a recipe is none of ours."""
    found = [name for name in ("DPOTrainer", "GRPOTrainer", "RewardTrainer") if name in theirs]
    return f"{found[0]} is not supervised fine-tuning" if found else None
