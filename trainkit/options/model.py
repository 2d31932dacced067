"""``model:``, ``lora:`` and ``kernels:`` what is trained, how it is adapted, what computes it."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from trainkit.errors import RecipeError
from trainkit.options.data import read_tokens
from trainkit.options.section import (
    ACTS,
    CONSENT,
    OTHER_STATE,
    OnResume,
    Section,
    broken_rule,
    did_you_mean,
)

Names = Annotated[list[str], Field(strict=False)]
"""Python code may give a tuple."""


# -- ``model.fp8:`` which matrix products run in 8 bits ------------------------------------------


ALL = "all"
"""No limit to what the loss may lose: every product that gains time."""


class Fp8Options(Section):
    """Products in fp8 (e4m3, quantised as they are made), as far as the loss bears it."""

    at: ClassVar[str] = "model.fp8"

    loss_budget: Annotated[float, Field(ge=0, lt=1)] | Literal["all"] = Field(
        0.005,
        description="By which share the loss may rise when products are rounded to fp8, measured "
        "on the run's own data before the first step; all: no limit.",
    )
    skip: Names = Field(
        default_factory=list,
        description="Layers that keep 16 bits: names, or parts of them between dots, as down_proj "
        "or layers.0.",
    )
    min_size: int = Field(
        16, ge=16, description="Layers with fewer inputs or outputs than this keep 16 bits."
    )
    head: Literal["bf16", "fp8"] = Field(
        "bf16", description="fp8: the output layer is measured and chosen like the others."
    )

    @classmethod
    def of(cls, value: "bool | str | Fp8Options") -> "Fp8Options | None":
        """What ``model.fp8`` says, spelt out; None for bf16 everywhere."""
        if isinstance(value, Fp8Options):
            return value
        if value == ALL:
            return cls(loss_budget=ALL)
        return cls() if value else None


# -- ``model:`` what is trained, and how it is loaded --------------------------------------------


Dtype = Literal["bfloat16", "float16", "float32", "auto"]
"""What weights can be loaded in: torch's names, or as they were saved."""

DTYPES: tuple[str, ...] = tuple(name for name in get_args(Dtype) if name != "auto")
"""Those that torch has."""


def _kind_of_fp8(value: object) -> str:
    """Which of its forms ``model.fp8`` has, so that errors are those of that form."""
    if isinstance(value, str):
        return "word"
    return "section" if isinstance(value, Mapping | Fp8Options) else "bool"


_NO = ("no", "off", "false", "none", "bf16", "")


def _form_of_fp8(value: object) -> object:
    """One of the three forms; what others are meant to say is in the fix."""
    if isinstance(value, bool | Mapping | Fp8Options) or value == ALL:
        return value
    word = str(value).lower()
    if isinstance(value, int | float):
        meant = f"{{loss_budget: {value}}}"
    else:
        meant = "false" if word in _NO else ALL if word in ("all", "every") else "true"
    raise broken_rule(
        "model.fp8",
        f"model.fp8: {value!r} must be true, false, all, or a section as {{loss_budget: 0.005}}",
        f"write model.fp8: {meant}",
    )


def _patterns(value: object) -> object:
    """One pattern may be given without a list, a layer without quotes."""
    items = value if isinstance(value, list | tuple) else [value]
    is_number = [isinstance(each, int) and not isinstance(each, bool) for each in items]
    return [str(each) if number else each for each, number in zip(items, is_number, strict=True)]


ROUTER_LOSSES = ("router_aux_loss", "router_z_loss")
"""Keys of ``model`` that give a model's routers losses of their own."""


class ModelOptions(Section):
    """What is trained."""

    at: ClassVar[str] = "model"

    name_or_path: Annotated[str, OnResume(CONSENT)] = Field(
        min_length=1, description="A directory, a .gguf file, or a name on the Hugging Face hub."
    )
    dtype: Annotated[Dtype, OnResume(OTHER_STATE)] = Field(
        "bfloat16", description="Of the weights in memory; auto keeps what the files hold."
    )
    master_weights: Annotated[bool, OnResume(OTHER_STATE)] = Field(
        True,
        description="Keep fp32 copies of trained bf16 weights; false rounds them by chance instead "
        "(stochastic rounding), without the 4 bytes for each.",
    )
    loss_chunk_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens whose logits the fused loss has at a time: fewer take less memory and "
        "some time. Null takes what 1.65 GiB hold.",
    )
    mlp_chunk_tokens: int | None = Field(
        None,
        ge=128,
        description="Tokens that a feed-forward block computes at a time, and again in the "
        "backward pass: for long rows. Null takes all.",
    )
    attn_implementation: str = Field(
        "auto",
        description="auto picks the fastest that isolates packed samples; or HF's own names.",
    )
    init: Annotated[Literal["pretrained", "random"], OnResume(CONSENT)] = Field(
        "pretrained", description="random builds the model from its config.json alone."
    )
    fp8: Annotated[
        Annotated[bool, Tag("bool")]
        | Annotated[Literal["all"], Tag("word")]
        | Annotated[Fp8Options, Tag("section")],
        Discriminator(_kind_of_fp8),
        BeforeValidator(_form_of_fp8),
    ] = Field(
        False,
        description="Matrix products in fp8: true as far as the loss bears it, all of them, or "
        "with a budget of your own. Over lora.quantize: fp8, which layers of the base.",
    )
    frozen: Annotated[
        list[str],
        BeforeValidator(_patterns, json_schema_input_type=list[str | int] | str | int),
        OnResume(OTHER_STATE),
    ] = Field(
        default_factory=list,
        description="Weights that do not train, without adapters: layers as 0-11, last-8 or "
        "last-8.mlp, parts of names as embed_tokens, or whole names with *; !NAME behind them "
        "trains it after all.",
    )
    train: Annotated[
        list[Literal["text", "projector", "vision"]], Field(strict=False), OnResume(OTHER_STATE)
    ] = Field(
        ["text"],
        min_length=1,
        description="The parts of a model for images that train, without adapters: text, the "
        "projector of what the tower sees, and vision, the tower itself.",
    )
    lr_ratios: Annotated[
        dict[Literal["text", "projector", "vision"], float], OnResume(OTHER_STATE)
    ] = Field(
        default_factory=dict,
        description="Learning rates of these parts over training.learning_rate, as {vision: 0.1}; "
        "with adapters, of theirs.",
    )
    add_tokens: Annotated[list[str] | str | None, OnResume(OTHER_STATE)] = Field(
        None,
        description="Tokens to add to the vocabulary, a list or a text file with one a line; each "
        "begins as the mean of the pieces that it was cut into, and embedding and head train.",
    )
    add_special_tokens: Annotated[list[str] | str | None, OnResume(OTHER_STATE)] = Field(
        None, description="The same for control tokens, which answers are printed without."
    )
    special_tokens: Annotated[
        dict[Literal["bos_token", "eos_token"], str], OnResume(OTHER_STATE)
    ] = Field(
        default_factory=dict,
        description="Other tokens of the vocabulary to begin and end texts with, as "
        "{eos_token: <|im_end|>}; a new one is in add_special_tokens, too.",
    )
    router_aux_loss: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="Of a mixture of experts: what the loss that balances them weighs. Null is as "
        "the model's config.json has it, which mostly leaves it out.",
    )
    router_z_loss: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Likewise, of the squared logsumexp of the routers' logits.",
    )
    revision: Annotated[str | None, OnResume(CONSENT)] = Field(
        None, description="Branch, tag or commit of a hub repository."
    )
    gguf_file: Annotated[str | None, OnResume(CONSENT)] = Field(
        None, description="The .gguf file inside name_or_path to read."
    )
    trust_remote_code: bool = Field(
        False, description="Run Python code that comes with the model. Off unless you trust it."
    )

    @field_validator("lr_ratios")
    @classmethod
    def _are_ratios(cls, value: dict[str, float]) -> dict[str, float]:
        for part, ratio in value.items():
            if not 1e-3 <= ratio <= 1e3:
                raise broken_rule(
                    f"model.lr_ratios.{part}",
                    f"{ratio:g} is no factor of training.learning_rate; it is 0.001 to 1000",
                    "0.1 trains it at a tenth of the rate; a part that is to stay as it is has no "
                    "place in model.train",
                )
        return value

    @property
    def adds_tokens(self) -> bool:
        return self.add_tokens is not None or self.add_special_tokens is not None

    def tokens(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The tokens to add, the ordinary and the special ones; files are read."""
        ordinary, special = (
            () if choice is None else read_tokens(choice, f"model.{key}")
            for key, choice in (
                ("add_tokens", self.add_tokens),
                ("add_special_tokens", self.add_special_tokens),
            )
        )
        if both := sorted(set(ordinary) & set(special)):
            raise RecipeError(
                f"model.add_special_tokens: {both[0]!r} is in model.add_tokens as well",
                where="model.add_special_tokens",
                fix="keep one: special tokens are left out of answers as they are printed",
            )
        return ordinary, special

    @field_validator("add_tokens", "add_special_tokens")
    @classmethod
    def _readable_tokens(cls, value: list[str] | str | None, info: Any) -> list[str] | str | None:
        if isinstance(value, list):
            try:
                read_tokens(value, f"model.{info.field_name}")
            except RecipeError as error:
                raise broken_rule(str(error.where), error.what, str(error.fix)) from None
        return value

    @model_validator(mode="after")
    def _random_has_no_weights(self) -> "ModelOptions":
        wanted = Fp8Options.of(self.fp8)
        if self.init == "random" and self.gguf_file is not None:
            raise broken_rule(
                "model.gguf_file",
                "model.init random reads no weights, so gguf_file has no use",
                "remove one of the two",
            )
        if self.init == "random" and wanted is not None and wanted.loss_budget != ALL:
            raise broken_rule(
                "model.fp8",
                "what fp8 costs is measured on trained weights, and model.init random has none",
                "write model.fp8: all, or remove model.init",
            )
        return self


# -- ``kernels:`` which of trainkit's kernels a model takes -----------------------------------


OPS: tuple[str, ...] = (
    "rms_norm",
    "add_rms_norm",
    "layer_norm",
    "add_layer_norm",
    "gated_rms_norm",
    "rope",
    "swiglu",
    "experts",
    "gated_delta_rule",
    "linear_cross_entropy",
)
"""The ops of a model, in the order of the report; see ``models.proof``."""

LORA_OPS: tuple[str, ...] = ("lora_mlp", "lora_qkv", "lora_linear", "lora_experts")
"""The ops of a model with adapters, in the order of the report; see ``lora.fused``."""


def _known_ops(kernels: bool | dict[str, bool]) -> bool | dict[str, bool]:
    known = (*OPS, *LORA_OPS)
    for op in kernels if isinstance(kernels, Mapping) else ():
        if op not in known:
            near = did_you_mean(op, known)
            raise broken_rule(
                f"kernels.{op}",
                f"kernels has no op {op!r}",
                f"{near or ''} The ops are {', '.join(known)}".strip(),
            )
    return kernels


Kernels = Annotated[
    bool | dict[str, bool],
    AfterValidator(_known_ops),
    Field(description="trainkit's kernels: all that are proved, none, or a switch per op."),
]
"""All, none, or a switch per op; an op that is not named is on."""


# -- ``lora:`` names that peft has are peft's ----------------------------------------------------


# -- What of peft's LoraConfig a recipe takes, and why it does not take the rest --------------


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

NOT_TAKEN: Mapping[str, str] = {
    "alora_invocation_tokens": _VARIANT,
    "alpha_pattern": "alpha goes with the ranks of lora.rank_pattern",
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
    "peft_type": "another kind of adapters is lora.peft: {peft_type: oft}",
    "peft_version": _SET_BY_TRAINKIT,
    "qalora_group_size": _VARIANT,
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

Quantized = Literal["nf4", "int8", "fp8"]
"""What a frozen base can be kept in; the rows of ``models.linears.LINEARS`` that can be loaded."""

QUANTIZED: tuple[str, ...] = get_args(Quantized)

OTHER_ADAPTERS = {
    **{kind: kind for kind in ("oft", "boft", "miss", "hra")},
    **{"loha": "hada", "lokr": "lokr", "vera": "vera", "fourierft": "fourierft"},
}
"""Kinds of peft's that train a model's layers and can be merged into them: how parameters begin."""


_OF_LORA_ALONE: tuple[tuple[str, Any], ...] = (
    *(("r", 16), ("alpha", 32), ("dropout", 0.0), ("target_parameters", [])),
    *(("use_rslora", False), ("use_dora", False), ("init_lora_weights", True)),
    *(("lora_bias", False), ("lora_plus_ratio", None), ("quantize", None)),
    ("rank_pattern", {}),
)


class LoraOptions(Section):
    """Adapters. A recipe without this section trains all weights."""

    at: ClassVar[str] = "lora"
    on_resume: ClassVar[str] = OTHER_STATE

    r: int = Field(16, ge=1, le=16_384, description="Rank of each adapter.")
    alpha: float = Field(32, gt=0, description="The adapter is scaled by alpha / r.")
    dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of adapter inputs dropped, but of target_parameters; above 0 is slower.",
    )
    target_modules: str | Names = Field(
        ALL_LINEAR, description="all-linear (without lm_head), names, or a regular expression."
    )
    target_parameters: Names = Field(
        default_factory=list,
        description="Parameters to adapt, as experts.down_proj; all-linear adds the experts.",
    )
    experts: Literal["auto", True, False, "split"] = Field(
        "auto",
        description="Adapt every expert of a mixture: auto does where target_modules is "
        "all-linear; true whatever is named, gate and up together; split each of the two at its "
        "own rank r; false leaves them out.",
    )
    rank_pattern: dict[str, Annotated[int, Field(ge=1, le=16_384)]] = Field(
        default_factory=dict,
        description="Ranks of some layers or parameters, by the ends of their names, as "
        "experts.down_proj: 8; their alpha grows by the same factor.",
    )
    exclude_modules: str | Names | None = Field(None, description="Names to leave out.")
    vision: bool = Field(
        False,
        description="all-linear takes the tower and the projector of a model for images, too; most "
        "servers read such adapters only once they are merged.",
    )
    quantize: Quantized | None = Field(
        None,
        description="nf4 keeps the frozen base in 4 bits (QLoRA); int8 in 8 (LLM.int8); fp8 in 8, "
        "multiplied so.",
    )
    quantize_experts: bool = Field(
        True, description="A mixture's experts are kept so, too; of int8 their weights alone."
    )
    quantize_skip: Names = Field(
        default_factory=list,
        description="Layers that nf4 and int8 leave in 16 bits: names, or parts of them between "
        "dots, as out_proj or layers.0.",
    )
    quantize_head: bool = Field(
        False, description="nf4 packs the output layer, too, where it is not the embedding."
    )
    peft: dict[str, bool | int | float | str] = Field(
        default_factory=dict,
        description="Another kind of adapters: {peft_type: oft, oft_block_size: 32}; r, alpha and "
        "the like are LoRA's.",
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
    saved_lr_ratio: float | None = Field(
        None, gt=0, description="Learning rate of modules_to_save over that of the adapters."
    )
    offload_activations: Annotated[Literal["auto", True, False], OnResume(ACTS)] = Field(
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
    def packing(self) -> dict[str, Any]:
        """What the numbers of a packed base depend on."""
        return {name: each for name, each in self if name.startswith("quantize")}

    @property
    def needs_whole_model(self) -> str | None:
        """The key that takes more than the layers of one rank to begin or to save; or None."""
        if self.peft:
            return "lora.peft"
        init = self.init_lora_weights
        if isinstance(init, str) and init not in ("gaussian", "orthogonal"):
            return "lora.init_lora_weights"
        return "lora.modules_to_save" if self.modules_to_save else None

    @model_validator(mode="after")
    def _keys_agree(self) -> "LoraOptions":
        kind = str(self.peft.get("peft_type")).lower()
        if self.peft and kind not in OTHER_ADAPTERS:
            why = f"peft_type is {kind}, and can be {', '.join(OTHER_ADAPTERS)}"
            raise broken_rule("lora.peft", why, "name one of them")
        for name, of_lora in _OF_LORA_ALONE if self.peft else ():
            if getattr(self, name) != of_lora and (name != "quantize" or self.quantize == "fp8"):
                raise broken_rule(
                    f"lora.{name}",
                    f"adapters of the kind {kind} have no {name} of LoRA's",
                    f"remove lora.{name}, or give peft's own in lora.peft",
                )
        for key, kinds in (("use_dora", ("int8", "fp8")), ("target_parameters", ("fp8",))):
            if self.quantize in kinds and getattr(self, key):
                raise broken_rule(
                    f"lora.{key}",
                    f"{key} reads the base's own weights, and they are {self.quantize} codes",
                    f"remove lora.{key}, or lora.quantize",
                )
        if self.vision and self.target_modules != ALL_LINEAR:
            raise broken_rule(
                "lora.vision",
                "it says what all-linear takes, and target_modules names its own",
                "remove it: names are looked for in the tower and the projector anyway",
            )
        if self.saved_lr_ratio is not None and self.lora_plus_ratio is not None:
            raise broken_rule(
                "lora.saved_lr_ratio",
                "next to lora_plus_ratio it has not been held against a run with either",
                "remove one of the two",
            )
        if self.quantize == "fp8" and not self.quantize_experts:
            raise broken_rule(
                "lora.quantize_experts",
                "experts in 16 bits have been held against a plain run under nf4 and int8 alone",
                "remove it, or set lora.quantize: nf4",
            )
        for key, kinds in (("quantize_skip", ("nf4", "int8")), ("quantize_head", ("nf4",))):
            if getattr(self, key) and self.quantize not in kinds:
                raise broken_rule(
                    f"lora.{key}",
                    f"it says what {' and '.join(kinds)} pack, and lora.quantize is "
                    f"{self.quantize or 'not set'}",
                    f"set lora.quantize: nf4, or remove lora.{key}; model.fp8 says it of fp8",
                )
        init = self.init_lora_weights
        if self.experts == "split" and init not in (True, "gaussian"):
            raise broken_rule(
                "lora.experts",
                f"init_lora_weights: {init} begins otherwise for one matrix than for two in it",
                "set lora.init_lora_weights: true, or lora.experts: true",
            )
        if self.changes_base and self.rank_pattern:
            raise broken_rule(
                "lora.rank_pattern",
                f"init_lora_weights: {init} is saved with twice one rank",
                "remove one of the two",
            )
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
