"""The recipe: the sections together, and the rules across them."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from trainkit.options import (
    DataSection,
    DistillOptions,
    EaftOptions,
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
from trainkit.options.model import ALL_LINEAR, LORA_OPS, ROUTER_LOSSES
from trainkit.options.optimizers import optimizer_row
from trainkit.options.parallel import Combination
from trainkit.options.section import ask, nearest
from trainkit.options.training import (
    COMPARING,
    DEFAULT_OBJECTIVE,
    OBJECTIVE_NAMES,
    PAIRED,
    REFERRING,
    SMOOTHED,
    WEIGHED,
    ObjectiveName,
)
from trainkit.parallel.matrix import COMPILES, DRAWN, refusals
from trainkit.recipe.training import CHECKPOINTING, FIELDS, complete_training

LOSS = "loss"

Broken = tuple[str, str, str]
"""The key, the rule that is broken, and what to write instead."""


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
    distill: DistillOptions | None = None
    eaft: EaftOptions | None = None
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
    callbacks: list[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$")]] = Field(
        default_factory=list,
        description="Callbacks of your own, as module.Class: transformers' TrainerCallback, made "
        "without arguments. PYTHONPATH=. finds a module in this folder.",
    )
    optim_in_backward: bool = Field(
        False,
        description="Each weight steps as soon as its gradient is there, and lets go of it: no "
        "gradient of the whole model is ever kept. Nothing can be clipped so.",
    )
    global_batch_size: int | None = Field(
        None,
        ge=1,
        le=2**24,
        description="Rows an optimizer step, over all GPUs; sets gradient_accumulation_steps.",
    )
    training: Annotated[dict[str, Any], AfterValidator(complete_training)] = Field(
        default_factory=dict,
        validate_default=True,
        description="TrainingArguments, field for field.",
    )

    @model_validator(mode="after")
    def _sections_agree(self) -> "Recipe":
        objectives = (_of_preferences, _of_shared_prompts, _of_weighing, _of_distillation)
        for rules in (_of_models, _of_rates, *objectives, _of_measurements, _of_steps):
            for broken in rules(self):
                raise broken_rule(*broken)
        for refusal in refusals(self._combination()):
            raise broken_rule(refusal.key, refusal.why, refusal.fix)
        return self

    @property
    def asks_reference(self) -> Literal["ahead", "base", "second model"] | None:
        """How the model before training is asked: once, by its adapters off, or as one more."""
        if self.objective not in REFERRING:
            return None
        ahead = (self.preference or PreferenceOptions()).precompute_reference
        if ahead or (ahead is None and self.lora is None):
            return "ahead"
        return "second model" if self.lora is None else "base"

    @property
    def metric(self) -> str:
        """What the best model, and an early end, are judged by; without ``eval_``."""
        return str(self.training.get("metric_for_best_model") or LOSS).removeprefix("eval_")

    @property
    def metric_every(self) -> int | None:
        """The steps between two measurements of ``metric``; None for a loss and the unknown."""
        if self.generation_eval is not None and self.metric in self.generation_eval.figures():
            return self.generation_eval.every
        if self.eval_tasks is not None and self.eval_tasks.may_measure(self.metric):
            return self.eval_tasks.every
        return None

    @property
    def recomputes(self) -> bool | None:
        """Whether ``recompute`` has layers recomputed; None where it says nothing."""
        said = self.recompute
        return None if said is None else RecomputeOptions.of(said) is not None

    def _combination(self) -> Combination:
        lora, recompute = self.lora, RecomputeOptions.of(self.recompute)
        answers = self.generation_eval is not None and self.generation_eval.every is not None
        figures = {"generation_eval.every": answers, "eval_tasks": self.eval_tasks is not None}
        figures[DRAWN] = self.distill is not None and self.distill.on_policy is not None
        offloads = {
            "recompute.offload": recompute is not None and recompute.offload is True,
            "lora.offload_activations": lora is not None and lora.offload_activations is True,
        }
        return Combination(
            shard=self.parallel.shard,
            tensor=self.parallel.tensor,
            sequence=self.parallel.sequence,
            pipeline=self.parallel.pipeline,
            schedule=self.parallel.schedule,
            model_dtype=self.model.dtype,
            quantize=lora.quantize if lora else None,
            has_adapters=lora is not None,
            is_packed=self.data.packing,
            training=self.training,
            attention=self.model.attn_implementation,
            max_length=self.data.max_length,
            measures=tuple(key for key, is_on in figures.items() if is_on),
            routers=tuple(f"model.{key}" for key in ROUTER_LOSSES if getattr(self.model, key)),
            computes_fp8=bool(self.model.fp8 or (lora is not None and lora.quantize == "fp8")),
            recompute=recompute,
            optim_in_backward=self.optim_in_backward,
            tiles_mlp=self.model.mlp_chunk_tokens is not None,
            master_weights=self.model.master_weights,
            objective=self.objective,
            adds_tokens=self.model.adds_tokens,
            offloads=next((key for key, is_on in offloads.items() if is_on), None),
            mixes_dtypes=lora is not None
            and bool(lora.modules_to_save or self.model.adds_tokens)
            and lora.adapter_dtype == "float32" != self.model.dtype,
            lora=None if lora is None else lora.needs_whole_model,
        )


def _of_models(recipe: Recipe) -> Iterator[Broken]:
    """Weights, adapters, kernels, and rows that are streamed to them."""
    model, lora, kernels, training = recipe.model, recipe.lora, recipe.kernels, recipe.training
    if lora and lora.quantize and model.init == "random":
        yield (
            "lora.quantize",
            "a randomly initialised base has no weights to quantize",
            "remove lora.quantize or model.init",
        )
    if lora and lora.quantize_head and (model.adds_tokens or lora.modules_to_save):
        yield (
            "lora.quantize_head",
            "what trains whole (lora.modules_to_save, model.add_tokens) has not been held against "
            "a plain run next to a packed output layer",
            "remove it",
        )
    for op in LORA_OPS if lora is None else ():
        if isinstance(kernels, dict) and kernels.get(op):
            yield (
                f"kernels.{op}",
                f"{op} is a kernel of adapters, and the recipe has no lora section",
                f"remove it, or write kernels.{op}: false",
            )
    fused = "linear_cross_entropy"
    fuses_loss = kernels.get(fused, True) if isinstance(kernels, dict) else kernels
    if model.loss_chunk_tokens is not None and not fuses_loss:
        yield (
            "model.loss_chunk_tokens",
            f"without the fused loss (kernels.{fused}) all logits exist at once",
            "write kernels: true, or remove it",
        )
    if model.mlp_chunk_tokens is not None:
        options = RecomputeOptions.of(recipe.recompute)
        if options is not None and options.selective:
            yield (
                "model.mlp_chunk_tokens",
                "recompute: selective keeps the products that tiles are there to let go of",
                "write recompute: full, or remove mlp_chunk_tokens",
            )
        if any(map(training.get, COMPILES)):
            yield (
                "model.mlp_chunk_tokens",
                "a compiled model with tiles has not been held against an uncompiled one",
                "remove torch_compile, or mlp_chunk_tokens",
            )
    over_base = lora is not None and lora.quantize == "fp8"
    if model.fp8 and lora and not over_base:
        yield (
            "model.fp8",
            "with adapters the products in fp8 are those of the frozen base, and "
            f"lora.quantize is {lora.quantize or 'not set'}",
            "set lora.quantize: fp8, or remove model.fp8",
        )
    if (model.fp8 or over_base) and training.get("torch_compile"):
        yield (
            "training.torch_compile",
            "fp8 products run in trainkit's own functions, which torch.compile does not take",
            f"remove torch_compile, or {'lora.quantize' if over_base else 'model.fp8'}",
        )
    if kernels and training.get("use_liger_kernel"):
        yield (
            "training.use_liger_kernel",
            "trainkit's kernels and Liger's replace the same modules",
            "remove use_liger_kernel, or write kernels: false",
        )
    if recipe.data.streaming and int(training.get("max_steps", -1)) <= 0:
        yield (
            "data.streaming",
            "streamed data has no length, so training.max_steps must say where to stop",
            "set training.max_steps, or data.streaming: false",
        )
    if recipe.data.streaming and training.get("train_sampling_strategy") == "group_by_length":
        yield (
            "training.train_sampling_strategy",
            "group_by_length needs the lengths of all samples, which streaming does not know",
            "remove one of the two",
        )


def _of_rates(recipe: Recipe) -> Iterator[Broken]:
    model, lora, training = recipe.model, recipe.lora, recipe.training
    if lora is not None and (model.frozen or model.train != ["text"]):
        yield (
            "model.frozen" if model.frozen else "model.train",
            "with adapters the model's own weights are frozen anyway, those that see images too",
            "remove it; lora.exclude_modules leaves layers without adapters",
        )
    names = lora is not None and (lora.target_modules != ALL_LINEAR or lora.modules_to_save)
    sees = lora is not None and lora.vision
    trained = model.train if lora is None else ["text", *(["projector", "vision"] if sees else [])]
    for part in () if names else model.lr_ratios.keys() - trained:
        yield (
            f"model.lr_ratios.{part}",
            f"the {part} does not train, so it has no learning rate",
            f"remove it, or {'add it to model.train' if lora is None else 'set lora.vision: true'}",
        )
    if lora is not None and lora.saved_lr_ratio and not (lora.modules_to_save or model.adds_tokens):
        what = "it is of modules that are saved whole, and none is"
        yield "lora.saved_lr_ratio", what, "remove it, or name them in lora.modules_to_save"
    name = optimizer_row(training.get("optim")).name
    rate = training.get("learning_rate", 5e-5)
    if rate == 0:
        yield (
            "training.learning_rate",
            "with a learning rate of 0 no weight would change",
            "1.0e-5 is usual for all weights, 1.0e-4 for adapters; trainkit eval measures without "
            "training",
        )
    factors = {"training.learning_rate": 1.0}
    for key in ("lora_plus_ratio", "saved_lr_ratio"):
        factors[f"lora.{key}"] = getattr(lora, key, None) or 0.0
    factors |= {f"model.lr_ratios.{part}": each for part, each in model.lr_ratios.items()}
    for key, factor in factors.items():
        value = rate * factor
        if value > 1 and name != "sgd":  # an exponent's sign was lost; sgd's steps are gradients
            yield (
                key,
                f"a learning rate of {value:g} moves each weight by more than its own size a "
                "step; it is at most 1",
                "1.0e-5 is usual for all weights, 1.0e-4 for adapters; only training.optim: sgd "
                "takes larger ones",
            )


def _of_preferences(recipe: Recipe) -> Iterator[Broken]:
    routers = [k for k in ROUTER_LOSSES if getattr(recipe.model, k)]
    if routers and recipe.objective != DEFAULT_OBJECTIVE:
        yield (
            f"model.{routers[0]}",
            f"objective: {recipe.objective} takes answers' log-probabilities alone, and nothing of "
            "what a model adds for its routers",
            "remove it",
        )
    if routers and recipe.parallel.sequence > 1:
        yield (
            f"model.{routers[0]}",
            "a rank of parallel.sequence has a part of each row, and does not know what is padding",
            "remove it, or parallel.sequence",
        )
    objective, given, lora = recipe.objective, recipe.preference, recipe.lora
    if objective not in COMPARING:
        if given is not None:
            yield (
                "preference",
                f"objective: {objective} compares no answers",
                f"remove it, or set objective: {', '.join(sorted(COMPARING))}",
            )
        return
    if recipe.data.mask == "none":
        yield (
            "data.mask",
            "answers are compared, and mask: none would score their prompt",
            "remove it, or write mask: assistant",
        )
    for key in ("generation_eval", "eval_tasks") if objective == "reward" else ():
        if getattr(recipe, key) is not None:
            yield key, "a reward model gives a text a number, and no next token", "remove it"
    if recipe.data.per_source_loss:
        yield ("data.per_source_loss", "the loss of pairs is not kept apart by source", "remove it")
    if recipe.training.get("label_smoothing_factor"):
        yield (
            "training.label_smoothing_factor",
            "it smooths over the vocabulary, which log-probabilities of answers do not have",
            "write preference.label_smoothing for pairs that may be the wrong way round",
        )
    owners: dict[str, tuple[str, ...]] = dict.fromkeys(
        ("loss", "label_smoothing", "length_normalized"), ("dpo",)
    )
    owners |= dict.fromkeys(("desirable_weight", "undesirable_weight"), ("kto",))
    owners |= {"center_rewards": ("reward",), "beta": tuple(sorted(COMPARING - {"reward"}))}
    owners |= {"sft_weight": ("dpo", "simpo"), "sft_prompt": ("orpo",)}
    owners |= {"gamma": ("simpo",), "precompute_reference": tuple(sorted(REFERRING))}
    owners |= {"share_prompts": tuple(sorted(PAIRED))}
    options = given or PreferenceOptions()
    if objective == "dpo" and options.label_smoothing and options.loss not in SMOOTHED:
        yield (
            "preference.label_smoothing",
            f"loss: {options.loss} knows no pairs that are the wrong way round",
            f"remove it, or set preference.loss: {' or '.join(SMOOTHED)}",
        )
    for key, of in owners.items():
        default = PreferenceOptions.model_fields[key].default  # which resolved recipes write out
        if objective not in of and getattr(options, key) != default:
            yield (
                f"preference.{key}",
                f"it is of {' and '.join(of)}, and the objective is {objective}",
                "remove it",
            )
    if objective in REFERRING and lora is not None and lora.changes_base:
        yield (
            "lora.init_lora_weights",
            f"{lora.init_lora_weights} takes a part out of the base's weights, so without its "
            "adapters the base is not the model before training",
            "remove it",
        )


def _of_weighing(recipe: Recipe) -> Iterator[Broken]:
    """Recipes that weigh tokens."""
    if recipe.eaft is not None and recipe.objective != "eaft":
        yield "eaft", f"objective: {recipe.objective} weighs by no entropy", "remove it"
    if recipe.objective not in WEIGHED:
        return
    if recipe.data.per_source_loss:
        yield ("data.per_source_loss", "a weighed loss is not kept apart by source", "remove it")
    if recipe.training.get("label_smoothing_factor"):
        yield (
            "training.label_smoothing_factor",
            "a token is weighed by what the model makes of it, in which smoothing has no part",
            "remove it, or set objective: sft",
        )


def _of_shared_prompts(recipe: Recipe) -> Iterator[Broken]:
    """Where two answers cannot attend to one prompt."""
    if recipe.preference is None or not recipe.preference.share_prompts:
        return
    attention = recipe.model.attn_implementation
    for key, value, is_fit in (
        ("data.packing", "false", recipe.data.packing),
        ("model.attn_implementation", attention, attention in ("auto", "trainkit")),
    ):
        if not is_fit:
            yield (
                key,
                f"{key}: {value} has no way for two answers of a row to attend to one prompt, as "
                "preference.share_prompts: true wants",
                "remove it, or write preference.share_prompts: false",
            )


def _of_distillation(recipe: Recipe) -> Iterator[Broken]:
    options = recipe.distill or DistillOptions()
    if recipe.objective != "distill":
        if recipe.distill is not None:
            yield "distill", f"objective: {recipe.objective} has no teacher", "remove it"
        return
    if recipe.training.get("label_smoothing_factor"):
        yield (
            "training.label_smoothing_factor",
            "a teacher's distribution takes the place of smoothed labels",
            "remove it",
        )
    if recipe.data.per_source_loss:
        yield "data.per_source_loss", "the divergence is not kept apart by source", "remove it"
    if options.teacher is None and options.temperature != 1:
        yield (
            "distill.temperature",
            "stored log-probabilities are of temperature 1, and those of the other tokens, which "
            "another one needs, are not there",
            "remove it, or name the teacher in distill.teacher",
        )
    if options.teacher is None and (options.teacher_revision or options.teacher_dtype):
        key = "teacher_revision" if options.teacher_revision else "teacher_dtype"
        yield f"distill.{key}", "no teacher is named", "remove it, or name distill.teacher"
    if options.on_policy is not None:
        if options.teacher is None:
            yield DRAWN, "rows have nothing of answers that are not drawn yet", "name a teacher"
        if options.sft_weight:
            yield (
                "distill.sft_weight",
                "the cross entropy of answers that a model drew itself teaches it nothing",
                "remove it, or distill.on_policy",
            )
        for key in ("packing", "streaming"):
            if getattr(recipe.data, key):
                yield (
                    f"data.{key}",
                    f"{key} plans rows ahead, and how long an answer will be is not known before "
                    f"it is drawn ({DRAWN})",
                    f"write {key}: false, or remove {DRAWN}",
                )
    if options.divergence != "jsd" and options.jsd_share != 0.5:
        yield "distill.jsd_share", "it is of divergence: jsd", "remove it"


def is_loss(metric: str) -> bool:
    """Whether a figure is a loss, of all data or of one source: lower is better."""
    return metric.removeprefix("eval_").partition("/")[0].endswith(LOSS)


def _of_measurements(recipe: Recipe) -> Iterator[Broken]:
    training, metric, every = recipe.training, recipe.metric, recipe.metric_every
    key, generation = "training.metric_for_best_model", recipe.generation_eval
    if every is None and generation is not None and metric in generation.figures():
        yield (
            key,
            f"{metric} is measured after training only",
            "set generation_eval.every to a number of steps",
        )
    elif every is None and metric != LOSS and not metric.startswith(f"{LOSS}/"):
        known = [LOSS] if recipe.data.eval else []
        if generation is not None and generation.every is not None:
            known += generation.figures()
        known += recipe.eval_tasks.figures() if recipe.eval_tasks is not None else []
        fixes = [ask(nearest(metric, known)), f"measured are {', '.join(known)}" if known else None]
        fixes.append("write loss, or loss/SOURCE with data.per_source_loss: true")
        fix = "; ".join(each for each in fixes if each)
        yield key, f"{key}: {metric!r} is not measured in training", fix
    if every is None and not recipe.data.eval:
        names = ["eval_strategy", "eval_on_start", "load_best_model_at_end"]
        if training.get("eval_strategy") not in ("no", False):
            names += ["eval_steps", "eval_delay", "metric_for_best_model", "greater_is_better"]
        names += ["save_strategy"] if training.get("save_strategy") == "best" else []
        for name in names:
            if training.get(name) not in (None, "no", False):
                what = f"training.{name} needs evaluation data, and data.eval is empty"
                yield f"training.{name}", what, f"give files in data.eval, or remove {name}"
        if recipe.early_stopping is not None:
            yield (
                "early_stopping",
                "early_stopping waits for a loss that is not measured: data.eval is empty",
                f"give files in data.eval, or name a measured figure in {key}",
            )
    strategy, steps = training.get("eval_strategy"), training.get("eval_steps")
    if every is not None and (
        strategy not in (None, "steps") or (steps is not None and steps != every)
    ):
        name = "eval_strategy" if strategy not in (None, "steps") else "eval_steps"
        yield (
            f"training.{name}",
            f"{metric} is measured every {every} steps, and decides which model is the best",
            f"remove {name}, or write eval_strategy: steps and eval_steps: {every}",
        )
    # An evaluation without a checkpoint may be the best: there would be no model of it to load. By
    # epochs both come at once, and of two strategies transformers has its own word.
    evaluated, saved = steps or every, training.get("save_steps")
    strategy = strategy or ("epoch" if evaluated is None else "steps")
    both = (strategy, training.get("save_strategy", "steps"))
    evaluated = evaluated or training.get("logging_steps", FIELDS["logging_steps"].default)
    is_apart = both == ("steps", "steps") and saved not in (None, evaluated)
    if training.get("load_best_model_at_end") and is_apart:
        yield (
            "training.save_steps",
            f"a model is evaluated every {evaluated} steps and saved every {saved}: of the best "
            "one there may be no checkpoint for load_best_model_at_end",
            f"remove save_steps, write save_steps: {evaluated}, or write save_strategy: best",
        )


def _of_steps(recipe: Recipe) -> Iterator[Broken]:
    """Recomputation, batches, rates and optimizers."""
    lora, training = recipe.lora, recipe.training
    for key in CHECKPOINTING if recipe.recompute is not None else ():
        if training.get(key) is not None:
            yield (
                "recompute",
                f"recompute and training.{key} both say what is recomputed",
                f"remove training.{key}"
                + ("" if key.endswith("kwargs") else ": it is short for recompute: full"),
            )
    options = RecomputeOptions.of(recipe.recompute)
    asks = options is not None and options.offload != "auto"
    if asks and lora is not None and lora.offload_activations != "auto":
        yield (
            "recompute.offload",
            "recompute.offload and lora.offload_activations both say what is offloaded",
            "remove lora.offload_activations",
        )
    total, micro = recipe.global_batch_size, training.get("per_device_train_batch_size")
    if total is not None and micro is not None and total % micro:
        smaller = total - total % micro
        yield (
            "global_batch_size",
            f"global_batch_size {total} is not a multiple of "
            f"training.per_device_train_batch_size {micro}",
            f"take {f'{smaller} or ' if smaller else ''}{smaller + micro}",
        )
    if recipe.faults.on_bad_numbers != "stop" and recipe.optim_in_backward:
        yield (
            "faults.on_bad_numbers",
            "optim_in_backward updates weights while the gradients are computed, before anybody "
            "knows whether the step is bad",
            "write on_bad_numbers: stop, or remove optim_in_backward",
        )
    name = optimizer_row(training.get("optim")).name
    if (decay := training.get("weight_decay", 0.0)) > 1 and "lion" not in name:
        yield (
            "training.weight_decay",
            f"a weight decay of {decay:g} shrinks the weights faster than they learn; it is at "
            "most 1",
            "0 to 0.1 is usual; only training.optim: lion_* takes larger ones",
        )
    scale = 0.0 if lora is None else lora.alpha / (lora.r**0.5 if lora.use_rslora else lora.r)
    if scale > 256:
        yield (
            "lora.alpha",
            f"the adapters would be scaled by {scale:g} (alpha / r); it is at most 256",
            "1 to 4 is usual: set lora.alpha to once or twice lora.r",
        )
    yield from late_warmup(training.get("warmup_steps") or 0, training.get("max_steps") or -1)
    is_fp16 = recipe.model.dtype == "float16" or bool(training.get("fp16"))
    if recipe.optim_in_backward:
        yield from _of_steps_in_backward(recipe, is_fp16=is_fp16)
    if not recipe.model.master_weights:
        yield from _of_weights_without_masters(recipe, is_fp16=is_fp16)
    if training.get("optim") == "flat_adamw" and is_fp16:
        yield (
            "training.optim",
            "flat_adamw has no loss scaler, which float16 needs",
            "set model.dtype: bfloat16, or training.optim: adamw_torch_fused",
        )


def late_warmup(warmup: float, last: int) -> Iterator[Broken]:
    """The rule that a warm-up ends before the run does."""
    if 0 < last < warmup:
        yield (
            "training.warmup_steps",
            f"the learning rate would rise for {warmup:g} steps, and the run has {last}",
            "write a share of all steps, as 0.03, or fewer steps; for a rate that rises to the end "
            f"write {last}",
        )


def accumulates_in_backward(accumulation: int) -> Iterator[Broken]:
    """The rule that a step in the backward pass is a step of one micro-batch."""
    if accumulation > 1:
        yield (
            "optim_in_backward",
            f"a step has {accumulation} micro-batches, and with optim_in_backward the weights "
            "would change after each of them",
            "set training.gradient_accumulation_steps: 1 (and no larger global_batch_size), or "
            "remove optim_in_backward",
        )


def _of_steps_in_backward(recipe: Recipe, *, is_fp16: bool) -> Iterator[Broken]:
    key, training = "optim_in_backward", recipe.training
    row = optimizer_row(training.get("optim"))
    if not row.steps_alone:
        yield (
            key,
            f"{row.name} steps all parameters together, or by their place among all",
            "set training.optim: adamw_torch_fused or adamw_8bit, or remove optim_in_backward",
        )
    max_norm = training.get("max_grad_norm", 1.0)
    if max_norm > 0:
        yield (
            "training.max_grad_norm",
            f"max_grad_norm: {max_norm} (transformers' default is 1.0) clips by the norm of all "
            "gradients, and with optim_in_backward the first are gone before the last are there",
            "set training.max_grad_norm: 0 (grad_norm is logged all the same), or remove "
            "optim_in_backward",
        )
    yield from accumulates_in_backward(int(training.get("gradient_accumulation_steps", 1)))
    if is_fp16:
        yield (
            key,
            "a loss scaler looks at all gradients before a step, and float16 needs one",
            "set model.dtype: bfloat16, or remove optim_in_backward",
        )
    if recipe.model.fp8:
        yield (
            key,
            "model.fp8 keeps codes of the weights from the forward to the backward pass",
            "remove one of the two",
        )
    if any((training.get(name) or {}).get("use_reentrant") for name in CHECKPOINTING[2:]):
        yield (
            key,
            "re-entrant checkpointing may hand over a gradient in parts, each of which would be "
            "taken for the whole",
            "remove use_reentrant (false is the default), or optim_in_backward",
        )


def _of_weights_without_masters(recipe: Recipe, *, is_fp16: bool) -> Iterator[Broken]:
    key = "model.master_weights"
    if recipe.lora is not None and recipe.lora.adapter_dtype == "float32":
        yield (
            key,
            "it does nothing here: the adapters are all that is trained, and they are fp32",
            "remove it, or set lora.adapter_dtype: model",
        )
    elif recipe.model.dtype == "float32":
        yield key, "it does nothing with fp32 weights", "remove it, or set model.dtype: bfloat16"
    elif is_fp16:
        yield (
            key,
            "float16 gradients need a loss scaler, and that needs fp32 masters",
            "set model.dtype: bfloat16",
        )
