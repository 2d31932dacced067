"""``model:`` what is trained, and how it is loaded."""

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
from trainkit.options.fp8 import ALL, Fp8Options
from trainkit.options.section import Section, broken_rule
from trainkit.options.words import did_you_mean

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


class ModelOptions(Section):
    """What is trained."""

    at: ClassVar[str] = "model"

    name_or_path: str = Field(
        min_length=1, description="A directory, a .gguf file, or a name on the Hugging Face hub."
    )
    dtype: Dtype = Field(
        "bfloat16", description="Of the weights in memory; auto keeps what the files hold."
    )
    master_weights: bool = Field(
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
    init: Literal["pretrained", "random"] = Field(
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
    ] = Field(
        default_factory=list,
        description="Weights that do not train, without adapters: layers as 0-11, last-8 or "
        "last-8.mlp, parts of names as embed_tokens, or whole names with *; !NAME behind them "
        "trains it after all.",
    )
    add_tokens: list[str] | str | None = Field(
        None,
        description="Tokens to add to the vocabulary, a list or a text file with one a line; each "
        "begins as the mean of the pieces that it was cut into, and embedding and head train.",
    )
    add_special_tokens: list[str] | str | None = Field(
        None, description="The same for control tokens, which answers are printed without."
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a hub repository.")
    gguf_file: str | None = Field(None, description="The .gguf file inside name_or_path to read.")
    trust_remote_code: bool = Field(
        False, description="Run Python code that comes with the model. Off unless you trust it."
    )

    @property
    def adds_tokens(self) -> bool:
        """Whether the tokenizer is extended."""
        return self.add_tokens is not None or self.add_special_tokens is not None

    def tokens(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The tokens to add, the ordinary and the special ones; files are read.

        Raises:
            RecipeError: a file cannot be read, or a token is blank, given twice or both.
        """
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
        if self.init == "random" and self.gguf_file is not None:
            raise broken_rule(
                "model.gguf_file",
                "model.init random reads no weights, so gguf_file has no use",
                "remove one of the two",
            )
        return self

    @model_validator(mode="after")
    def _random_weights_measure_nothing(self) -> "ModelOptions":
        wanted = Fp8Options.of(self.fp8)
        if self.init == "random" and wanted is not None and wanted.loss_budget != ALL:
            raise broken_rule(
                "model.fp8",
                "what fp8 costs is measured on trained weights, and model.init random has none",
                "write model.fp8: all, or remove model.init",
            )
        return self


# -- ``kernels:`` which of trainkit's kernels a model takes ---------------------------------------


OPS: tuple[str, ...] = (
    "rms_norm",
    "add_rms_norm",
    "layer_norm",
    "add_layer_norm",
    "gated_rms_norm",
    "rope",
    "swiglu",
    "experts",
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
