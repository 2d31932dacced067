"""``lora:`` what is adapted and how. Names that peft has are peft's."""

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field, field_validator, model_validator

from trainkit.options.section import Section, broken_rule

# -- What of peft's LoraConfig a recipe takes, and why it does not take the rest ------------------


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


ALL_LINEAR = "all-linear"
"""Every linear layer but the output one."""

Quantized = Literal["nf4", "fp8"]
"""What a frozen base can be kept in; the rows of ``models.linears.LINEARS`` that can be loaded."""

QUANTIZED: tuple[str, ...] = get_args(Quantized)

Names = Annotated[list[str], Field(strict=False)]
"""Python code may give a tuple."""


class LoraOptions(Section):
    """Adapters. A recipe without this section trains all weights."""

    at: ClassVar[str] = "lora"

    r: int = Field(16, ge=1, le=16_384, description="Rank of each adapter.")
    alpha: float = Field(32, gt=0, description="The adapter is scaled by alpha / r.")
    dropout: float = Field(
        0.0, ge=0, lt=1, description="Share of adapter inputs dropped; above 0 is slower."
    )
    target_modules: str | Names = Field(
        ALL_LINEAR, description="all-linear (without lm_head), names, or a regular expression."
    )
    target_parameters: Names = Field(
        default_factory=list,
        description="Parameters to adapt, as experts.down_proj; all-linear adds the experts.",
    )
    exclude_modules: str | Names | None = Field(None, description="Names to leave out.")
    quantize: Quantized | None = Field(
        None, description="nf4 keeps the frozen base in 4 bits (QLoRA); fp8 in 8, multiplied so."
    )
    use_rslora: bool = Field(False, description="Scale by alpha / sqrt(r).")
    use_dora: bool = Field(False, description="Train magnitude and direction apart; slower.")
    modules_to_save: Names = Field(
        default_factory=list, description="Modules trained and saved in full next to the adapters."
    )
    init_lora_weights: bool | str = Field(
        True,
        description="true, false, gaussian, orthogonal, mica; pissa, pissa_niter_N and olora take "
        "the base apart and are saved as plain LoRA of twice the rank.",
    )
    lora_bias: bool = Field(False, description="Give the adapter's second matrix a bias.")
    adapter_dtype: Literal["float32", "model"] = Field(
        "float32", description="Of the adapters: float32, or the base's dtype."
    )
    lora_plus_ratio: float | None = Field(
        None, gt=0, description="Learning rate of B over that of A (LoRA+, usually 16)."
    )
    offload_activations: Literal["auto", True, False] = Field(
        "auto",
        description="Checkpointed activations wait in host memory; auto does on a GPU where the "
        "model is wide enough to hide the copies.",
    )

    @field_validator("init_lora_weights")
    @classmethod
    def _known_initialisation(cls, value: bool | str) -> bool | str:
        if reason := why_not_initialisation(value):
            raise ValueError(reason)
        return value

    @property
    def changes_base(self) -> bool:
        """Whether the base without its adapters is another model than the one that was loaded."""
        init = self.init_lora_weights
        return isinstance(init, str) and init.startswith(("pissa", "olora"))

    @property
    def needs_whole_model(self) -> str | None:
        """The key that takes more than the layers of one rank to begin or to save; or None."""
        init = self.init_lora_weights
        if isinstance(init, str) and init not in ("gaussian", "orthogonal"):
            return "lora.init_lora_weights"
        return "lora.modules_to_save" if self.modules_to_save else None

    @model_validator(mode="after")
    def _fp8_fits(self) -> "LoraOptions":
        for key in ("use_dora", "target_parameters"):
            if self.quantize == "fp8" and getattr(self, key):
                raise broken_rule(
                    f"lora.{key}",
                    f"{key} reads the base's own weights, and they are fp8 codes",
                    f"remove lora.{key}, or lora.quantize",
                )
        return self

    @model_validator(mode="after")
    def _initialisation_fits(self) -> "LoraOptions":
        init = self.init_lora_weights
        if isinstance(init, bool):
            return self
        key = "lora.init_lora_weights"
        if self.quantize and init.startswith(("pissa", "olora", "mica")):
            raise broken_rule(
                key,
                f"init_lora_weights: {init} needs the base's own weights, and they are quantised",
                "remove lora.quantize, or set init_lora_weights: true",
            )
        if self.lora_bias:
            raise broken_rule(
                key,
                "lora_bias goes with init_lora_weights true or false only",
                "remove one of the two",
            )
        if init == "orthogonal" and self.r % 2:
            raise broken_rule(key, "orthogonal needs an even rank", f"set lora.r: {self.r + 1}")
        return self
