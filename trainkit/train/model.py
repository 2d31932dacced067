"""From a model's name to the module that is trained: loaded, adapters attached, kernels swapped in.

The order matters and is kept here: the process group and DeepSpeed's configuration come before the
load (ZeRO-3 shards while loading), adapters before kernels (the report counts what will run).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from transformers import PreTrainedConfig, PreTrainedModel, TrainingArguments
from transformers.trainer_utils import align_special_tokens

from trainkit.auto_class import empty_model
from trainkit.errors import ModelError, RecipeError
from trainkit.models import attention as own_attention
from trainkit.models.attention import Attention, attention_heads, resolve_attention
from trainkit.models.attention.packable import state_of
from trainkit.models.attention.proof import require_proof, settle
from trainkit.models.frozen import freeze
from trainkit.models.linears import (
    count_parameters,
    kind_of,
    num_weights,
    packed_kind,
    prepare_for_training,
    quantization_config,
)
from trainkit.models.loading import TORCH_DTYPES, can_set_attention, exact_decays, load_model
from trainkit.models.proof.replica import outermost
from trainkit.models.tokenizer import load_config, new_tokens
from trainkit.models.vision import Sight, choose_parts
from trainkit.models.vocabulary import refuse_frozen_tokens
from trainkit.options import LoraOptions, ModelOptions
from trainkit.parallel.engine import Engine
from trainkit.parallel.parameters import made_whole

if TYPE_CHECKING:
    from trainkit.models.fp8.choice import Fp8Choice
    from trainkit.models.fp8.decide import Fp8Setup, Fp8Training
    from trainkit.models.patch import PatchReport


@dataclass(frozen=True)
class BuiltModel:
    """A model ready to be trained, and what was done to it.

    Attributes:
        report: what kernels and fused adapters replaced; None when none were asked for.
        adapters: what is adapted and what is quantised; None for full fine-tuning.
        num_towers: frozen parameters of towers that no text reaches.
        fp8: what trains in fp8, and how it was chosen; None where nothing does.
        fp8_base: which layers of a frozen base are kept in fp8; None where nobody chose.
        num_frozen: parameters that ``model.frozen`` names.
    """

    model: PreTrainedModel | PeftModel
    attention: Attention
    report: PatchReport | None
    num_trained: int
    num_parameters: int
    adapters: dict[str, Any] | None = None
    num_towers: int = 0
    fp8: Fp8Training | None = None
    fp8_base: Fp8Choice | None = None
    num_frozen: int = 0

    @property
    def fp8_choice(self) -> Fp8Choice | None:
        """Which products run in fp8, of a base or of a model that trains."""
        return self.fp8_base if self.fp8 is None else self.fp8.choice

    @property
    def runs(self) -> dict[str, str]:
        """The attention and each kernel that runs, as a continued run must have them."""
        if self.report is None:
            return {"attention": self.attention.name}
        ops = {row.op: row.status for row in self.report.rows}
        plan = self.report.to_dict().get("plan")
        found = {"attention": self.attention.name, **ops}
        return {**found, "plan": str(plan)} if plan else found

    def check_kernels(self, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Hold attention and kernels against the plain model and say what runs.

        The result is what ``kernels.json`` holds.

        Args:
            batch: ``input_ids`` and ``labels`` of real samples, (B, S).
        """
        require_proof(self.attention)
        record: dict[str, Any] = {"attention": asdict(self.attention)}
        if self.adapters is not None:
            record["adapters"] = self.adapters
        if self.fp8 is not None:
            record["fp8"] = {**self.fp8.choice.to_dict(), **self.fp8.errors}
        elif any(kind and kind.name == "fp8" for kind in map(kind_of, self.model.modules())):
            from trainkit.models.fp8.base import describe_fp8

            chosen = {} if self.fp8_base is None else self.fp8_base.to_dict()
            record["fp8"] = {**chosen, **describe_fp8(self.model)}
        if self.num_towers:
            record["frozen_towers"] = {"parameters": self.num_towers}
        if self.report is None:
            return {**record, "ops": [], "reason": "kernels: false in the recipe"}
        from trainkit.models.self_check import self_check

        # Kernels are held against the plain model in its own precision.
        suspended = nullcontext() if self.fp8 is None else self.fp8.swaps.suspended()
        with suspended:
            checks = self_check(self.model, self.report, batch)
        return {**record, **self.report.to_dict(), "self_check": checks}

    def describe(self) -> str:
        share = self.num_trained / max(self.num_parameters, 1)
        lines = [
            f"model: {self.num_parameters / 1e6:.1f} M parameters, {share:.2%} of them trained"
        ]
        if self.adapters is not None:
            from trainkit.lora.report import adapter_lines

            lines += adapter_lines(self.adapters)
        for number, what in (self.num_towers, " for images, video or sound"), (self.num_frozen, ""):
            lines += [f"frozen: {number / 1e6:.1f} M parameters{what}"] if number else []
        lines += [
            f"attention: {self.attention.name} ({self.attention.reason})",
            str(self.report) if self.report else "kernels: none replaced (kernels: false)",
            *([] if self.fp8_choice is None else self.fp8_choice.describe()),
        ]
        return "\n".join(lines)


def build_model(
    source: ModelOptions,
    *,
    config: PreTrainedConfig | None = None,
    packing: bool,
    lora: LoraOptions | None,
    kernels: bool | Mapping[str, bool],
    device: torch.device,
    engine: Engine | None = None,
    reentrant: bool = False,
    fp8: Fp8Setup | None = None,
    adapters_from: Path | None = None,
    is_proved: bool = True,
    sees_images: bool = False,
    scalar_head: bool = False,
) -> BuiltModel:
    """Load the model and put adapters and kernels into it.

    Args:
        source: where the weights are.
        config: what its files say of it, where that is known.
        packing: several documents share a row.
        lora: adapters, and what the frozen base is packed in; None for full fine-tuning.
        kernels: all, none, or per op.
        device: where this process computes.
        engine: says where weights go as they are loaded, and which; None loads all of them here.
        reentrant: reentrant gradient checkpointing, which needs gradients at the embeddings.
        fp8: how products in fp8 are chosen; None: none of weights that train, all of an fp8 base.
        adapters_from: where trained adapters are; None attaches fresh ones.
        is_proved: False does without the proof of attention: a broken model cannot pass it.
        sees_images: rows have images; without them the modules that see are never called.
        scalar_head: add one, which trains whole.
    """
    engine, is_auto = engine or Engine(), source.attn_implementation == "auto"
    config = config or load_config(source)
    chosen = _attention(source, config, packing=packing)
    # Every class has eager attention; what was chosen is set to be proved.
    can_set = is_auto or can_set_attention(config)
    model: Any
    # Classes draw as they are made, and how often depends on where: fresh adapters must not.
    drawing = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with exact_decays(config, not engine.keeps_masters), drawing:
        model, base = _loaded(
            source, config, "eager" if can_set else chosen.name, lora, fp8, device, engine
        )
    prepare_for_training(model)  # before the first forward
    proving = {"packed": packing, "is_proved": is_proved, "apart": kernels is not False}
    chosen = settle(model, chosen, is_auto=is_auto, **proving)
    num_towers, num_frozen = _freeze(model, source, reentrant, sees_images)
    lora = _with_scalar_head(model, lora) if scalar_head else lora
    adapters = training = None
    if lora is not None:
        model, adapters = _adapted(model, source, lora, adapters_from, reentrant, device)
    elif source.adds_tokens and new_tokens(source).pieces:
        refuse_frozen_tokens(model)
    report = None if kernels is False else _patched(model, kernels, packing)
    if lora is not None and lora.dropout:
        from trainkit.lora.fused import refuse_undropped

        parts = engine.loading_device(device) is None or engine.reads_parts(device) is not None
        refuse_undropped(model, sharded=parts)
    if source.mlp_chunk_tokens is not None:
        from trainkit.models.tiled import tile

        tile(model, source.mlp_chunk_tokens)
    if fp8 is not None and lora is None:
        from trainkit.models.fp8.decide import train_in_fp8
        from trainkit.models.proof.norms import let_norms_quantize

        training = train_in_fp8(model, fp8, device)
        let_norms_quantize(model)
    counts = count_parameters(model)
    return BuiltModel(
        model, chosen, report, *counts, adapters, num_towers, training, base, num_frozen
    )


def _patched(model: Any, kernels: bool | Mapping[str, bool], packing: bool) -> PatchReport:
    """The kernels, in the model; documents that share a row need those that keep them apart."""
    from trainkit.patching import patch

    report: PatchReport = patch(model, kernels)
    if packing and (state := state_of(outermost(model))) is not None:
        raise ModelError(
            f"rows cannot be packed: {state}, and {report.row('gated_delta_rule').reason}",
            where="data.packing",
            fix="set data.packing to false",
        )
    return report


def _loaded(
    source: ModelOptions,
    config: PreTrainedConfig,
    attention: str,
    lora: LoraOptions | None,
    fp8: Fp8Setup | None,
    device: torch.device,
    engine: Engine,
) -> tuple[Any, Fp8Choice | None]:
    """The model where it will train, and which linear layers of its base are in fp8."""
    quantization = None
    place, reads_parts = engine.loading_device(device), engine.reads_parts(device)
    if lora is not None and lora.quantize is not None:
        from trainkit.lora import quant

        quantize = lora.quantize
        quant.refuse_unfit_device(quantize, device)
        with made_whole():
            empty = empty_model(config, trust_remote_code=source.trust_remote_code)
            quant.refuse_unpackable(empty, lora)
            packs_experts = quant.packs_experts(empty, lora)
        if packs_experts and (place is None or reads_parts is not None):
            raise RecipeError(
                f"experts in {quantize} are whole on each GPU: codes of a stack have not been "
                "proved in parts",
                where="lora.quantize",
                fix="set parallel.shard: zero2 or none; or remove lora.quantize",
            )
        if packs_experts or packed_kind(quantize).convert is not None:
            return quant.packed_base(source, lora, fp8, device, attention)
        quantization = quantization_config(quantize, dtype_of(source, config))
    # Adapters may begin from the base's weights, or be around more than its linear maps.
    reads_base = lora and (lora.needs_whole_model or lora.use_dora or lora.target_parameters)
    plain = load_model(
        source,
        attention=attention,
        quantization=quantization,
        config=copy.deepcopy(config),
        lora=lora,
        device=place,
        load_part=engine.load_part,
        reads_parts=None if fp8 is not None or reads_base else reads_parts,
    )
    return plain, None


def _freeze(
    model: PreTrainedModel, source: ModelOptions, reentrant: bool, sees_images: bool
) -> tuple[int, int]:
    """What does not train of a model's parts, and what the recipe names; how many weights each."""
    towers = choose_parts(model, source.train)
    if sees_images:
        Sight(model)
    frozen = freeze(model, source.frozen) if source.frozen else {}
    if frozen and reentrant:
        model.enable_input_require_grads()  # else nothing after a frozen embedding trains
    first, second = (sum(map(num_weights, each.values())) for each in (towers, frozen))
    return first, second


def _with_scalar_head(model: PreTrainedModel, lora: LoraOptions | None) -> LoraOptions | None:
    """Give the model one; the adapters' options, with it among what trains whole."""
    from trainkit.models.scalar_head import NAME, add_scalar_head

    add_scalar_head(model)
    return lora and lora.replace(modules_to_save=[*lora.modules_to_save, NAME])


def _adapted(
    model: PreTrainedModel,
    source: ModelOptions,
    lora: LoraOptions,
    trained: Path | None,
    reentrant: bool,
    device: torch.device,
) -> tuple[PeftModel, dict[str, Any]]:
    from trainkit.lora.adapter import attach, drop_inputs, load_adapter, with_vocabulary
    from trainkit.lora.report import describe_adapters
    from trainkit.models.skeleton import is_skeleton, standing_in

    if source.adds_tokens and new_tokens(source).pieces:
        lora = with_vocabulary(lora, model)
    with standing_in(model, device) if is_skeleton(model) else nullcontext():
        if trained is None:
            adapted = attach(model, lora, require_input_grads=reentrant)
        else:
            adapted = load_adapter(model, trained, trainable=True)
            if any(each.target_parameters for each in adapted.peft_config.values()):
                drop_inputs(adapted, lora)
    return adapted, describe_adapters(adapted)


def prepare_to_train(model: Any, tokenizer: Any, args: TrainingArguments) -> None:
    if args.use_liger_kernel:
        from transformers.integrations.liger import apply_liger_kernel

        apply_liger_kernel(model, args.liger_kernel_config)
    if args.gradient_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)(
            dict(args.gradient_checkpointing_kwargs or {})
        )
    align_special_tokens(model, tokenizer)
    if "underflow_overflow" in args.debug:
        from transformers.debug_utils import DebugUnderflowOverflow

        DebugUnderflowOverflow(model)


def _attention(source: ModelOptions, config: PreTrainedConfig, *, packing: bool) -> Attention:
    """Turn ``auto`` into a name, by the device and the model's sizes."""
    own_attention.register()
    wanted = source.attn_implementation
    if wanted not in ("auto", own_attention.NAME):
        return Attention(wanted, "named in the recipe")
    heads = attention_heads(config.get_text_config())
    if not heads:
        return Attention("eager", "the model has no attention")
    return resolve_attention(
        packed=packing,
        device="cuda" if torch.cuda.is_available() else "cpu",
        dtype=dtype_of(source, config),
        head_size=max(size for _, size in heads),
    )


def dtype_of(source: ModelOptions, config: PreTrainedConfig) -> torch.dtype:
    """Of the weights in memory; what the files hold where the recipe leaves it to them."""
    given = TORCH_DTYPES.get(source.dtype)
    return given or config.dtype or torch.bfloat16
