"""What of peft's LoraConfig a recipe takes, and why it does not take the rest."""

import re
from collections.abc import Mapping

INITIALISATIONS: tuple[str, ...] = (
    "gaussian",
    "orthogonal",
    "mica",
    "pissa",
    "pissa_niter_N",
    "olora",
)
"""The names of ``lora.init_lora_weights``, besides true and false; N is a number of iterations."""

_NEEDS_A_PASS = "it needs a pass over the data before training, which trainkit does not make"
REFUSED_INITIALISATIONS: Mapping[str, str] = {
    "eva": _NEEDS_A_PASS,
    "corda": _NEEDS_A_PASS,
    "lora_ga": _NEEDS_A_PASS,
    "loftq": "the adapter would fit a base that is quantised otherwise than any saved one",
}

_NAME = re.compile(r"gaussian|orthogonal|mica|pissa(_niter_[1-9]\d{0,2})?|olora")


def why_not_initialisation(value: bool | str) -> str | None:
    """Why adapters cannot start in this way; None if they can."""
    if isinstance(value, bool) or _NAME.fullmatch(value):
        return None
    known = f"true, false, {', '.join(INITIALISATIONS)}"
    reason = REFUSED_INITIALISATIONS.get(value.lower(), "it is not known")
    return f"{reason}; it can be {known}"


_VARIANT = "trainkit trains plain LoRA, rsLoRA, DoRA and LoRA+"
_SET_BY_TRAINKIT = "trainkit sets it itself"
_ONE_RANK = "every adapter has rank lora.r; give the modules to adapt in lora.target_modules"

NOT_TAKEN: Mapping[str, str] = {
    "alora_invocation_tokens": _VARIANT,
    "alpha_pattern": _ONE_RANK,
    "arrow_config": _VARIANT,
    "auto_mapping": _SET_BY_TRAINKIT,
    "base_model_name_or_path": "the base is model.name_or_path",
    "bias": "the base's own biases stay frozen (none); lora.lora_bias: true gives each adapter one",
    "corda_config": _NEEDS_A_PASS,
    "ensure_weight_tying": "tied embeddings stay tied where one end is trained",
    "eva_config": _NEEDS_A_PASS,
    "fan_in_fan_out": "peft finds it by the kind of layer",
    "inference_mode": _SET_BY_TRAINKIT,
    "kasa_config": _VARIANT,
    "layer_replication": "the layers of the base stay as they are",
    "layers_pattern": "name the layers in lora.target_modules as a regular expression",
    "layers_to_transform": "name the layers in lora.target_modules as a regular expression: "
    r".*\.layers\.(0|1)\..*_proj",
    "loftq_config": REFUSED_INITIALISATIONS["loftq"],
    "lora_ga_config": _NEEDS_A_PASS,
    "megatron_config": "Megatron's layers are not trained here",
    "megatron_core": "Megatron's layers are not trained here",
    "monteclora_config": _VARIANT,
    "peft_type": _SET_BY_TRAINKIT,
    "peft_version": _SET_BY_TRAINKIT,
    "qalora_group_size": _VARIANT,
    "rank_pattern": _ONE_RANK,
    "revision": "the revision is model.revision",
    "runtime_config": _SET_BY_TRAINKIT,
    "task_type": _SET_BY_TRAINKIT,
    "trainable_token_indices": "give embed_tokens in lora.modules_to_save",
    "use_bdlora": _VARIANT,
    "use_qalora": _VARIANT,
    "velora_config": _VARIANT,
}
"""Fields of peft's LoraConfig that are not keys of ``lora:``, and what to do instead."""
