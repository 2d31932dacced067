"""Which of transformers' auto classes loads a model that is trained on text."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import transformers  # its models, seconds of imports, are found when they are asked for
from huggingface_hub.errors import StrictDataclassError

from trainkit.errors import ModelError
from trainkit.options.vision import VISION

FAILURES = (
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    AssertionError,
    ImportError,
    NameError,
    StrictDataclassError,
)
"""What any model's code may raise where it is called in a way that it does not take."""


def auto_class(config: transformers.PreTrainedConfig) -> Any:
    """The auto class for a configuration.

    Models that also take images (qwen2_vl) are not causal language models to transformers, though
    they train on text alone as such; what they are saved as is then what they were loaded as.
    Where transformers has a class for the text alone (qwen3_5), the one that sees is loaded if its
    images can be trained, unless the configuration names the other, see `text_alone`.
    """
    refuse_scalar_head(config.architectures, config.name_or_path or "model.name_or_path")
    own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    text, with_images = transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText
    sees = type(config) in with_images._model_mapping and not own_code
    alone = _text_class(config)
    is_trained = config.model_type in VISION and alone not in (config.architectures or ())
    if sees and (is_trained or alone is None):
        return with_images
    if not own_code and alone is None:
        raise ModelError(
            f"model_type {config.model_type!r}: transformers has no causal language model of it, "
            "and none that sees images, and these two train here",
            where=config.name_or_path or "model.name_or_path",
            fix="name one that AutoModelForCausalLM or AutoModelForImageTextToText loads",
        )
    return text


def text_alone(config: Any, wanted: bool = True) -> Any:
    """The configuration, of transformers' class of text alone from now on, where there is one."""
    if wanted and (name := _text_class(config)) is not None:
        config.architectures = [name]
    return config


def _text_class(config: Any) -> str | None:
    known = transformers.AutoModelForCausalLM._model_mapping
    return known[type(config)].__name__ if type(config) in known else None


def refuse_scalar_head(architectures: object, where: str) -> None:
    """Stop where a model is loaded to go on with tokens."""
    names = architectures if isinstance(architectures, list) else []
    if any("SequenceClassification" in name or name == "SEQ_CLS" for name in map(str, names)):
        raise ModelError(
            "this is a reward model: it gives a text a number, and no next token",
            where=where,
            fix="load it with transformers' AutoModelForSequenceClassification, an adapter with "
            "peft's AutoPeftModelForSequenceClassification",
        )


def empty_model(
    config: transformers.PreTrainedConfig, *, trust_remote_code: bool, **options: Any
) -> Any:
    """The model on the meta device: modules and shapes, no memory. ``config`` stays as it is.

    Whether its own code may run is always said: left out, transformers would ask the terminal.
    """
    with torch.device("meta"):
        return auto_class(config).from_config(
            copy.deepcopy(config), trust_remote_code=trust_remote_code, **options
        )


def whole_model(
    directory: Path, *, trust_remote_code: bool, alone: bool = False, **options: Any
) -> transformers.PreTrainedModel:
    """The model of a directory, with its weights; see `text_alone`."""
    config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    config = text_alone(config, alone)
    model: transformers.PreTrainedModel = auto_class(config).from_pretrained(
        directory, trust_remote_code=trust_remote_code, **options
    )
    return model


def without_adapters(model: Any) -> Any:
    """The model that peft has wrapped; one that it has not is the same."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def is_own_code(model: Any) -> bool:
    """Whether a model runs code that came with it, which somebody has allowed here then."""
    return type(without_adapters(model)).__module__.startswith("transformers_modules.")


ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""Names of small layers that choose experts: neither adapted nor rounded."""


def holds_experts(name: str, module: torch.nn.Module) -> bool:
    """Whether a module's own parameters of three dimensions are the weights of experts."""
    return name.rpartition(".")[2] == "experts" or type(module).__name__.endswith("Experts")
