"""The recipe: frozen sections with their defaults, units and rules.

Every default of trainkit is here and nowhere else. A rule about two keys of one section is
in that section; a rule across sections is in ``Recipe``.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from trainkit.parallel.strategies import NONE, STRATEGIES
from trainkit.recipe.adapters import why_not_initialisation
from trainkit.recipe.document import read_scalar
from trainkit.recipe.training import check_training, complete_training

KERNEL_OPS = ("rms_norm", "add_rms_norm", "rope", "swiglu", "linear_cross_entropy")
"""The switches of ``kernels:``; a test holds them equal to ``trainkit.models.families.OPS``."""


RowFormat = Literal[
    "auto",
    "messages",
    "sharegpt",
    "belle",
    "alpaca",
    "moss",
    "leetcode",
    "prompt_completion",
    "text",
    "tokens",
]
"""``auto`` and ``trainkit.data.read.formats.FORMATS``; a test holds them equal."""


def broken_rule(key: str, what: str, fix: str) -> PydanticCustomError:
    """A rule about more than one key, reported at the line of ``key``."""
    return PydanticCustomError("rule", "{what}", {"key": key, "what": what, "fix": fix})


class Section(BaseModel):
    """A part of the recipe: unknown keys and wrong types are errors, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


class ModelSection(Section):
    """What is trained."""

    name_or_path: str = Field(
        min_length=1, description="A directory, a .gguf file, or a name on the Hugging Face hub."
    )
    dtype: Literal["bfloat16", "float16", "float32", "auto"] = Field(
        "bfloat16", description="Of the weights in memory; auto keeps what the files hold."
    )
    attn_implementation: str = Field(
        "auto",
        description="auto picks the fastest that isolates packed samples; or HF's own names.",
    )
    init: Literal["pretrained", "random"] = Field(
        "pretrained", description="random builds the model from its config.json alone."
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a hub repository.")
    gguf_file: str | None = Field(None, description="The .gguf file inside name_or_path to read.")
    trust_remote_code: bool = Field(
        False, description="Run Python code that comes with the model. Off unless you trust it."
    )

    @model_validator(mode="after")
    def _random_has_no_weights(self) -> "ModelSection":
        if self.init == "random" and self.gguf_file is not None:
            raise broken_rule(
                "model.gguf_file",
                "model.init random reads no weights, so gguf_file has no use",
                "remove one of the two",
            )
        return self


class SourceSpec(Section):
    """A source of conversations."""

    path: str = Field(min_length=1, description="A file, a directory or a glob.")
    weight: float | None = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="Share of the mixture, relative to the other weights; 0 is none of it.",
    )
    max_samples: int | None = Field(
        None, ge=1, description="Rows to draw, by a seeded choice; also written FILE#N."
    )
    epochs: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="How often its rows appear in one epoch."
    )
    format: RowFormat = Field("auto", description="Of the rows; auto looks at them.")
    name: str | None = Field(None, description="For logs; the file's name without it.")
    split: str = Field("train", description="Of a hub data set.")
    columns: dict[str, str] = Field(
        default_factory=dict, description="Our column name to the file's: {messages: dialog}."
    )
    roles: list[str] = Field(
        default_factory=list, description="Trained roles of this source; empty is data.roles."
    )


def _source(value: Any) -> Any:
    """``FILE#N`` is ``{path: FILE, max_samples: N}``."""
    if isinstance(value, str):
        value = {"path": value}
    if isinstance(value, dict) and isinstance(value.get("path"), str):
        path, mark, count = value["path"].rpartition("#")
        if mark and path and count.isdecimal():
            if "max_samples" in value:
                raise broken_rule(
                    "max_samples",
                    f"{value['path']} already says how many samples",
                    "remove #N or max_samples",
                )
            value = {**value, "path": path, "max_samples": int(count)}
    return value


def _sources(value: Any) -> Any:
    """One source may be given without a list."""
    return [value] if isinstance(value, str | dict) else value


def _count_or_share(value: Any) -> Any:
    """``1%`` is 0.01; a count stays whole."""
    if isinstance(value, str) and value.endswith("%"):
        share = read_scalar(value[:-1].strip())
        value = share / 100 if isinstance(share, int | float) else value
    is_share = isinstance(value, float) and 0 <= value <= 1
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if not (value is None or is_share or is_count):
        raise ValueError("must be a count such as 20, a share such as 1%, or null")
    return value


MaxDropped = Annotated[int | float | None, BeforeValidator(_count_or_share)]
Source = Annotated[SourceSpec, BeforeValidator(_source)]
Sources = Annotated[list[Source], BeforeValidator(_sources)]


class DataSection(Section):
    """What it is trained on, and how conversations become batches.

    Relative paths start at the directory the command is typed in. The order of the samples follows
    ``training.seed`` and ``training.data_seed``.
    """

    train: Sources = Field(min_length=1, description="Files to train on.")
    eval: Sources = Field(default_factory=list, description="Held-out files; they turn eval on.")
    max_length: int = Field(2048, ge=2, description="Longest sample, and packed row, in tokens.")
    packing: bool = Field(
        True, description="Put several complete samples into one row; they do not see each other."
    )
    mask: Literal["assistant", "last_assistant", "none"] = Field(
        "assistant", description="Which turns are trained; none trains every token (pretraining)."
    )
    truncation: Literal["drop_turns", "drop", "error", "right", "left_turns"] = Field(
        "drop_turns",
        description="For samples over max_length: leave out the last turns, drop the sample, stop, "
        "cut at the right, or leave out the first turns.",
    )
    format: RowFormat = Field(
        "auto", description="Of the rows, for sources that do not say their own."
    )
    thinking: Literal["template", "split", "preserve"] = Field(
        "template",
        description="Earlier turns' <think> parts: as the chat template shows them, one sample a "
        "turn, or kept.",
    )
    roles: list[str] = Field(
        default_factory=lambda: ["assistant"], min_length=1, description="The roles trained."
    )
    system_policy: str = Field(
        "keep", description="keep, none (remove system turns), or a text for all conversations."
    )
    chat_template: str | None = Field(
        None, description="A Jinja template, or a file with one, instead of the tokenizer's own."
    )
    template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="For the chat template: {enable_thinking: false}."
    )
    append_eos: bool = Field(
        False, description="End every answer that the template leaves open with the eos token."
    )
    max_dropped: MaxDropped = Field(
        None,
        description="Unusable rows allowed before the run stops: a count, a share (1% or 0.01), "
        "or null for 1%. A share also allows for as many trained tokens lost to max_length.",
    )
    cache_dir: str | None = Field(
        None, description="Where tokenised data is kept; null is the user's cache directory."
    )
    num_workers: int | None = Field(
        None, ge=0, description="Processes that tokenise; null is one a core."
    )
    streaming: bool | Annotated[int, Field(ge=1)] = Field(
        False,
        description="Read the training rows as they are needed and keep nothing on disk; a number "
        "is the samples shuffled together, true is 4096. Needs training.max_steps.",
    )
    per_source_loss: bool | None = Field(
        None, description="Log the loss of each source; null does where there are several."
    )

    @model_validator(mode="after")
    def _sources_are_shown(self) -> "DataSection":
        if all(source.weight == 0 for source in self.train):
            raise broken_rule(
                "data.train",
                "every source has weight 0, so there is nothing to train on",
                "give one of them a weight above 0",
            )
        for index, source in enumerate(self.eval):
            if source.weight is not None or source.epochs != 1:
                key = "epochs" if source.weight is None else "weight"
                raise broken_rule(
                    "data.eval",
                    f"data.eval[{index}].{key} has no effect: evaluation shows every row once",
                    "remove it; max_samples evaluates a part",
                )
        return self


class LoraSection(Section):
    """Adapters. A recipe without this section trains all weights."""

    r: int = Field(16, ge=1, description="Rank of each adapter.")
    alpha: float = Field(32, gt=0, description="The adapter is scaled by alpha / r.")
    dropout: float = Field(
        0.0, ge=0, lt=1, description="Share of adapter inputs dropped; above 0 is slower."
    )
    target_modules: str | list[str] = Field(
        "all-linear", description="all-linear (without lm_head), names, or a regular expression."
    )
    target_parameters: list[str] = Field(
        default_factory=list,
        description="Parameters to adapt, as experts.down_proj; all-linear adds the experts.",
    )
    exclude_modules: str | list[str] | None = Field(None, description="Names to leave out.")
    quantize: Literal["nf4", "fp8"] | None = Field(
        None, description="nf4 keeps the frozen base in 4 bits (QLoRA); fp8 in 8, multiplied so."
    )
    use_rslora: bool = Field(False, description="Scale by alpha / sqrt(r).")
    use_dora: bool = Field(False, description="Train magnitude and direction apart; slower.")
    modules_to_save: list[str] = Field(
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

    @model_validator(mode="after")
    def _fp8_fits(self) -> "LoraSection":
        for key in ("use_dora", "target_parameters"):
            if self.quantize == "fp8" and getattr(self, key):
                raise broken_rule(
                    f"lora.{key}",
                    f"{key} reads the base's own weights, and they are fp8 codes",
                    f"remove lora.{key}, or lora.quantize",
                )
        return self

    @model_validator(mode="after")
    def _initialisation_fits(self) -> "LoraSection":
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


class ParallelSection(Section):
    """How a run is spread over processes."""

    shard: Annotated[str, BeforeValidator(lambda value: NONE if value is None else value)] = Field(
        NONE,
        description=f"{', '.join(STRATEGIES)}, or a DeepSpeed JSON file. `deepspeed: zero2` is "
        "short for `parallel: {shard: zero2}`.",
    )


class GenerationEvalSection(Section):
    """After training, answer held-out conversations greedily and count exact matches."""

    data: Sources = Field(min_length=1, description="Files of conversations with their answers.")
    max_new_tokens: int = Field(128, ge=1, description="Longest answer, in tokens.")
    max_samples: int | None = Field(None, ge=1, description="Answers to ask for; null is all.")
    batch_size: int = Field(16, ge=1, description="Conversations answered at once.")


class Recipe(Section):
    """Everything a run is made of."""

    name: str | None = Field(
        None,
        pattern=r"^[\w][\w.-]*$",
        description="Of the run directory; null takes the recipe file's name.",
    )
    model: ModelSection
    data: DataSection
    lora: LoraSection | None = None
    kernels: bool | dict[str, bool] = Field(
        False, description="trainkit's kernels: all, none, or per op; ops not named are on."
    )
    parallel: ParallelSection = ParallelSection(shard=NONE)
    generation_eval: GenerationEvalSection | None = None
    global_batch_size: int | None = Field(
        None,
        ge=1,
        description="Rows an optimizer step, over all GPUs; sets gradient_accumulation_steps.",
    )
    training: dict[str, Any] = Field(
        default_factory=dict,
        validate_default=True,
        description="TrainingArguments, field for field.",
    )

    @field_validator("kernels")
    @classmethod
    def _known_ops(cls, value: bool | dict[str, bool]) -> bool | dict[str, bool]:
        unknown = [] if isinstance(value, bool) else [op for op in value if op not in KERNEL_OPS]
        if unknown:
            raise ValueError(f"has no op {unknown[0]!r}; the ops are {', '.join(KERNEL_OPS)}")
        return value

    @field_validator("training")
    @classmethod
    def _fits_training_arguments(cls, value: dict[str, Any]) -> dict[str, Any]:
        problems = check_training(value)
        if problems:
            raise ValueError("; ".join(problem.what for problem in problems))
        return complete_training(value)

    @model_validator(mode="after")
    def _sections_agree(self) -> "Recipe":
        training = self.training
        if self.lora and self.lora.quantize and self.model.init == "random":
            raise broken_rule(
                "lora.quantize",
                "a randomly initialised base has no weights to quantize",
                "remove lora.quantize or model.init",
            )
        if self.lora and self.lora.quantize == "fp8" and training.get("torch_compile"):
            raise broken_rule(
                "training.torch_compile",
                "fp8 products run in trainkit's own functions, which torch.compile does not take",
                "remove torch_compile, or lora.quantize",
            )
        if self.kernels and training.get("use_liger_kernel"):
            raise broken_rule(
                "training.use_liger_kernel",
                "trainkit's kernels and Liger's replace the same modules",
                "remove use_liger_kernel, or write kernels: false",
            )
        if self.data.streaming:
            self._can_stream()
        if not self.data.eval:
            self._needs_no_eval_data()
        self._measures_the_metric()
        self._batch_sizes_agree()
        return self

    def _can_stream(self) -> None:
        if int(self.training.get("max_steps", -1)) <= 0:
            raise broken_rule(
                "data.streaming",
                "streamed data has no length, so training.max_steps must say where to stop",
                "set training.max_steps, or data.streaming: false",
            )
        if self.training.get("train_sampling_strategy") == "group_by_length":
            raise broken_rule(
                "training.train_sampling_strategy",
                "group_by_length needs the lengths of all samples, which streaming does not know",
                "remove one of the two",
            )

    def _needs_no_eval_data(self) -> None:
        for key in ("eval_strategy", "load_best_model_at_end"):
            if self.training.get(key, "no") not in ("no", False):
                raise broken_rule(
                    f"training.{key}",
                    f"training.{key} needs evaluation data, and data.eval is empty",
                    f"give files in data.eval, or remove {key}",
                )

    def _measures_the_metric(self) -> None:
        metric = str(self.training.get("metric_for_best_model") or "loss").removeprefix("eval_")
        if metric != "loss" and not metric.startswith("loss/"):
            raise broken_rule(
                "training.metric_for_best_model",
                f"training.metric_for_best_model: {metric!r} is not measured in training",
                "write loss, or loss/SOURCE with data.per_source_loss: true",
            )

    def _batch_sizes_agree(self) -> None:
        total, micro = self.global_batch_size, self.training.get("per_device_train_batch_size")
        if total is None:
            return
        if self.training.get("auto_find_batch_size"):
            raise broken_rule(
                "training.auto_find_batch_size",
                "auto_find_batch_size changes the batch that global_batch_size fixes",
                "remove one of the two",
            )
        if micro is not None and total % micro:
            raise broken_rule(
                "global_batch_size",
                f"global_batch_size {total} is not a multiple of "
                f"training.per_device_train_batch_size {micro}",
                f"take {total - total % micro or micro} or {total - total % micro + micro}",
            )
