"""The recipe: the sections together, and the rules across them."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from trainkit.options import (
    DataSection,
    EarlyStopping,
    FaultOptions,
    GenerationOptions,
    Kernels,
    LoraOptions,
    ModelOptions,
    ParallelOptions,
    PreferenceOptions,
    Recompute,
    RecomputeOptions,
    Section,
    TaskOptions,
    broken_rule,
)
from trainkit.options.model import LORA_OPS
from trainkit.options.parallel import Combination
from trainkit.options.training import DEFAULT_OBJECTIVE, OBJECTIVE_NAMES, ObjectiveName
from trainkit.parallel.matrix import COMPILES, refusals
from trainkit.recipe.preference import broken_preference_rules
from trainkit.recipe.rules import Measured, Trained, broken_optimizer_rules, problems
from trainkit.recipe.training import CHECKPOINTING, complete_training


class Recipe(Section):
    """Everything a run is made of."""

    name: str | None = Field(
        None,
        pattern=r"^[\w][\w.-]*$",
        description="Of the run directory; null takes the recipe file's name.",
    )
    model: ModelOptions
    data: DataSection
    objective: ObjectiveName = Field(
        DEFAULT_OBJECTIVE,
        description="What is optimised: "
        + "; ".join(f"{name}: {what}" for name, what in OBJECTIVE_NAMES.items())
        + ".",
    )
    preference: PreferenceOptions | None = None
    lora: LoraOptions | None = None
    kernels: Kernels = False
    parallel: ParallelOptions = ParallelOptions()
    recompute: Recompute | None = Field(
        None,
        description="Activations that are computed again in the backward pass: none, full, "
        "selective, {every: k} or {budget_gib: N}. Null leaves it to "
        "training.gradient_checkpointing, which is full.",
    )
    generation_eval: GenerationOptions | None = None
    eval_tasks: TaskOptions | None = None
    early_stopping: EarlyStopping | None = None
    faults: FaultOptions = FaultOptions()
    optim_in_backward: bool = Field(
        False,
        description="Each weight steps as soon as its gradient is there, and lets go of it: no "
        "gradient of the whole model is ever kept. Nothing can be clipped so.",
    )
    global_batch_size: int | None = Field(
        None,
        ge=1,
        description="Rows an optimizer step, over all GPUs; sets gradient_accumulation_steps.",
    )
    training: Annotated[dict[str, Any], AfterValidator(complete_training)] = Field(
        default_factory=dict,
        validate_default=True,
        description="TrainingArguments, field for field.",
    )

    @model_validator(mode="after")
    def _sections_agree(self) -> "Recipe":
        training = self.training
        if self.lora and self.lora.quantize and self.model.init == "random":
            raise broken_rule(
                "lora.quantize",
                "a randomly initialised base has no weights to quantize",
                "remove lora.quantize or model.init",
            )
        if self.lora is None and isinstance(self.kernels, dict):
            self._has_no_adapters(self.kernels)
        if self.lora is not None and self.model.frozen:
            raise broken_rule(
                "model.frozen",
                "with adapters the model's own weights are frozen anyway",
                "remove it; lora.exclude_modules leaves layers without adapters",
            )
        if self.model.loss_chunk_tokens is not None and not self._fuses_loss():
            raise broken_rule(
                "model.loss_chunk_tokens",
                "without the fused loss (kernels.linear_cross_entropy) all logits exist at once",
                "write kernels: true, or remove it",
            )
        self._tiles_fit()
        self._fp8_fits()
        if self.kernels and training.get("use_liger_kernel"):
            raise broken_rule(
                "training.use_liger_kernel",
                "trainkit's kernels and Liger's replace the same modules",
                "remove use_liger_kernel, or write kernels: false",
            )
        if self.data.streaming:
            self._can_stream()
        for broken in broken_preference_rules(
            self.objective, self.preference, self.data, self.lora, training
        ):
            raise broken_rule(*broken)
        for problem in problems(self.training, self.measured(), self.early_stopping):
            raise broken_rule(*problem)
        self._recomputes_in_one_way()
        self._batch_sizes_agree()
        self._can_leave_out_steps()
        trained = Trained(self.model, self.lora, training, self.optim_in_backward)
        for broken in broken_optimizer_rules(trained):
            raise broken_rule(*broken)
        for refusal in refusals(self._combination()):
            raise broken_rule(refusal.key, refusal.why, refusal.fix)
        return self

    def _fuses_loss(self) -> bool:
        if isinstance(self.kernels, dict):
            return self.kernels.get("linear_cross_entropy", True)
        return self.kernels

    def measured(self) -> Measured:
        """What the run measures while it trains."""
        return Measured(bool(self.data.eval), self.generation_eval, self.eval_tasks)

    def _tiles_fit(self) -> None:
        if self.model.mlp_chunk_tokens is None:
            return
        options = RecomputeOptions.of(self.recompute)
        if options is not None and options.selective:
            raise broken_rule(
                "model.mlp_chunk_tokens",
                "recompute: selective keeps the products that tiles are there to let go of",
                "write recompute: full, or remove mlp_chunk_tokens",
            )
        if any(map(self.training.get, COMPILES)):
            raise broken_rule(
                "model.mlp_chunk_tokens",
                "a compiled model with tiles has not been held against an uncompiled one",
                "remove torch_compile, or mlp_chunk_tokens",
            )

    def _fp8_fits(self) -> None:
        over_base = self.lora is not None and self.lora.quantize == "fp8"
        if self.model.fp8 and self.lora and not over_base:
            raise broken_rule(
                "model.fp8",
                "with adapters the products in fp8 are those of the frozen base, and "
                f"lora.quantize is {self.lora.quantize or 'not set'}",
                "set lora.quantize: fp8, or remove model.fp8",
            )
        if (self.model.fp8 or over_base) and self.training.get("torch_compile"):
            raise broken_rule(
                "training.torch_compile",
                "fp8 products run in trainkit's own functions, which torch.compile does not take",
                f"remove torch_compile, or {'lora.quantize' if over_base else 'model.fp8'}",
            )

    def _recomputes_in_one_way(self) -> None:
        if self.recompute is None:
            return
        for key in CHECKPOINTING:
            if self.training.get(key) is not None:
                raise broken_rule(
                    "recompute",
                    f"recompute and training.{key} both say what is recomputed",
                    f"remove training.{key}"
                    + ("" if key.endswith("kwargs") else ": it is short for recompute: full"),
                )
        options = RecomputeOptions.of(self.recompute)
        asks = options is not None and options.offload != "auto"
        if asks and self.lora is not None and self.lora.offload_activations != "auto":
            raise broken_rule(
                "recompute.offload",
                "recompute.offload and lora.offload_activations both say what is offloaded",
                "remove lora.offload_activations",
            )

    def _offloads(self) -> str | None:
        """The key that sends activations to the host; None where no key asks for it."""
        options = RecomputeOptions.of(self.recompute)
        if options is not None and options.offload is True:
            return "recompute.offload"
        by_adapters = self.lora is not None and self.lora.offload_activations is True
        return "lora.offload_activations" if by_adapters else None

    def _combination(self) -> Combination:
        return Combination(
            parallel=self.parallel,
            model_dtype=self.model.dtype,
            quantize=self.lora.quantize if self.lora else None,
            has_adapters=self.lora is not None,
            is_packed=self.data.packing,
            training=self.training,
            attention=self.model.attn_implementation,
            max_length=self.data.max_length,
            measures=self.measured().keys(),
            computes_fp8=bool(
                self.model.fp8 or (self.lora is not None and self.lora.quantize == "fp8")
            ),
            recompute=RecomputeOptions.of(self.recompute),
            optim_in_backward=self.optim_in_backward,
            tiles_mlp=self.model.mlp_chunk_tokens is not None,
            master_weights=self.model.master_weights,
            objective=self.objective,
            adds_tokens=self.model.adds_tokens,
            offloads=self._offloads(),
            mixes_dtypes=self.lora is not None
            and bool(self.lora.modules_to_save or self.model.adds_tokens)
            and self.lora.adapter_dtype == "float32" != self.model.dtype,
            lora=None if self.lora is None else self.lora.needs_whole_model,
        )

    @staticmethod
    def _has_no_adapters(kernels: dict[str, bool]) -> None:
        for op in LORA_OPS:
            if kernels.get(op):
                raise broken_rule(
                    f"kernels.{op}",
                    f"{op} is a kernel of adapters, and the recipe has no lora section",
                    f"remove it, or write kernels.{op}: false",
                )

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

    def _can_leave_out_steps(self) -> None:
        if self.faults.on_bad_numbers != "stop" and self.optim_in_backward:
            raise broken_rule(
                "faults.on_bad_numbers",
                "optim_in_backward updates weights while the gradients are computed, before "
                "anybody knows whether the step is bad",
                "write on_bad_numbers: stop, or remove optim_in_backward",
            )

    def _batch_sizes_agree(self) -> None:
        total, micro = self.global_batch_size, self.training.get("per_device_train_batch_size")
        if total is None:
            return
        if micro is not None and total % micro:
            raise broken_rule(
                "global_batch_size",
                f"global_batch_size {total} is not a multiple of "
                f"training.per_device_train_batch_size {micro}",
                f"take {total - total % micro or micro} or {total - total % micro + micro}",
            )
