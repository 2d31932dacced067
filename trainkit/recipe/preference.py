"""What recipes that compare two answers must keep to."""

from collections.abc import Iterator
from typing import Any

from trainkit.options import DataSection, LoraOptions, PreferenceOptions
from trainkit.options.training import COMPARING, SMOOTHED


def broken_preference_rules(
    objective: str,
    given: PreferenceOptions | None,
    data: DataSection,
    lora: LoraOptions | None,
    training: dict[str, Any],
) -> Iterator[tuple[str, str, str]]:
    """Of each broken rule the key, what is wrong, and what to write instead."""
    if objective not in COMPARING:
        if given is not None:
            yield (
                "preference",
                f"objective: {objective} compares no answers",
                f"remove it, or set objective: {', '.join(sorted(COMPARING))}",
            )
        return
    if data.mask == "none":
        yield (
            "data.mask",
            "answers are compared, and mask: none would score their prompt",
            "remove it, or write mask: assistant",
        )
    if data.per_source_loss:
        yield ("data.per_source_loss", "the loss of pairs is not kept apart by source", "remove it")
    if training.get("label_smoothing_factor"):
        yield (
            "training.label_smoothing_factor",
            "it smooths over the vocabulary, which log-probabilities of answers do not have",
            "write preference.label_smoothing for pairs that may be the wrong way round",
        )
    if objective == "dpo":
        yield from _dpo(given or PreferenceOptions(), lora)
        return
    for key in ("loss", "label_smoothing", "length_normalized"):
        if given is not None and key in given.model_fields_set:
            yield (
                f"preference.{key}",
                f"it is dpo's, and the objective is {objective}",
                "remove it",
            )
    if given is not None and "gamma" in given.model_fields_set and objective != "simpo":
        yield ("preference.gamma", f"it is simpo's, and the objective is {objective}", "remove it")


def _dpo(options: PreferenceOptions, lora: LoraOptions | None) -> Iterator[tuple[str, str, str]]:
    if options.label_smoothing and options.loss not in SMOOTHED:
        yield (
            "preference.label_smoothing",
            f"loss: {options.loss} knows no pairs that are the wrong way round",
            f"remove it, or set preference.loss: {' or '.join(SMOOTHED)}",
        )
    if "gamma" in options.model_fields_set:
        yield ("preference.gamma", "it is simpo's, and the objective is dpo", "remove it")
    if lora is None:
        yield (
            "objective",
            "dpo compares with the model before training, which is there while adapters train and "
            "can be switched off, and the recipe has no lora section",
            "add lora: {r: 16}, or set objective: simpo or orpo, which need no such model",
        )
    elif lora.changes_base:
        yield (
            "lora.init_lora_weights",
            f"{lora.init_lora_weights} takes a part out of the base's weights, so without its "
            "adapters the base is not the model before training",
            "remove it",
        )
