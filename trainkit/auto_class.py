"""Which of transformers' auto classes loads a model that is trained on text."""

from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig


def auto_class(config: PreTrainedConfig) -> Any:
    """The auto class for a configuration.

    Models that also take images (qwen2_vl) are not causal language models to transformers, though
    they train on text alone as such; what they are saved as is then what they were loaded as.

    Args:
        config: the model's own, not its text part.
    """
    own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if type(config) in AutoModelForCausalLM._model_mapping or own_code:
        return AutoModelForCausalLM
    if type(config) in AutoModelForImageTextToText._model_mapping:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM  # it names the model and what it knows
