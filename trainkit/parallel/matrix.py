"""THE TABLE of what cannot be combined with a way of spreading a run, and why. No torch.

What no row refuses is allowed, and ``python -m benchmarks parity`` holds it against one process.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from trainkit.options.optimizers import FSDP2, OPTIMIZERS, ZERO, optimizer_row
from trainkit.options.parallel import NONE, Combination


@dataclass(frozen=True)
class Refusal:
    """One row."""

    key: str
    applies: Callable[[Combination], bool]
    why: str
    fix: str


def _fsdp2(combination: Combination) -> bool:
    return combination.shard == "fsdp2"


SHARDED_OPTIMIZERS = tuple(name for name, row in OPTIMIZERS.items() if FSDP2 in row.shards)
"""torch's own: they compute on parts of weights as on whole ones. Others want whole weights, or run
functions of their own that do not know parts."""


def _deepspeed(combination: Combination) -> bool:
    return combination.shard not in (NONE, "fsdp2")


def _no_flat_shards(*, with_reason: str) -> Refusal:
    """Optimizers that ZeRO's flat shards would make another algorithm of, by the reason why."""

    def applies(combination: Combination) -> bool:
        row = optimizer_row(combination.training.get("optim"))
        return _deepspeed(combination) and ZERO not in row.shards and row.why_whole == with_reason

    return Refusal(
        "training.optim",
        applies,
        f"ZeRO gives an optimizer flat shards of all weights together: {with_reason}",
        "set training.optim: adamw_torch_fused or adamw_8bit, or remove deepspeed",
    )


COMPILES = ("torch_compile", "torch_compile_backend", "torch_compile_mode")
"""Each has the model compiled."""


def _chooses(combination: Combination) -> bool:
    """Whether layers differ in what they recompute, or keep a part of it."""
    options = combination.recompute
    return options is not None and (options.every != 1 or options.selective)


def _splits_weights(combination: Combination) -> bool:
    return combination.tensor > 1 or combination.shard in ("zero3", "zero3_offload", "fsdp2")


def _has_no_whole_model(combination: Combination) -> bool:
    """No rank can run the model at its own pace: each holds a part of its weights or rows."""
    splits = max(combination.sequence, combination.pipeline) > 1
    return splits or _splits_weights(combination)


_EACH_ITS_OWN = (
    "each process asks the model questions of its own, and here none holds all of it: they would "
    "wait for one another"
)
_AFTERWARDS = "measure checkpoints with `trainkit eval`, or take parallel: {shard: zero2}"

DRAWN = "distill.on_policy"

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "model.mlp_chunk_tokens",
        lambda one: one.tiles_mlp and (_splits_weights(one) or one.pipeline > 1),
        "a tile of the backward pass needs whole weights, and here a rank holds a part of them",
        "remove it, or take parallel: {shard: zero2} (and sequence, for rows on several GPUs)",
    ),
    Refusal(
        "eval_tasks",
        lambda one: "eval_tasks" in one.measures and _has_no_whole_model(one),
        _EACH_ITS_OWN,
        f"remove eval_tasks and {_AFTERWARDS}",
    ),
    Refusal(
        "generation_eval.every",
        lambda one: "generation_eval.every" in one.measures and _has_no_whole_model(one),
        _EACH_ITS_OWN,
        f"remove every (answers come after training) and {_AFTERWARDS}",
    ),
    Refusal(
        DRAWN,
        lambda one: DRAWN in one.measures and _has_no_whole_model(one),
        _EACH_ITS_OWN,
        "remove on_policy, or take parallel: {shard: zero2}",
    ),
    Refusal(
        "parallel.shard",
        lambda one: one.tensor > 1 and one.shard != "zero1",
        "parallel.tensor is DeepSpeed's AutoTP, held against one process under zero1 only",
        "set shard: zero1",
    ),
    Refusal(
        "lora",
        lambda one: one.tensor > 1 and one.has_adapters,
        "with parallel.tensor an adapter next to a split matrix would have to be split with it, "
        "which no engine here does",
        "remove parallel.tensor: adapters need little memory, and shard: zero3 splits the base",
    ),
    Refusal(
        "parallel.tensor",
        lambda one: one.tensor > 1 and one.computes_fp8,
        "fp8 products of split matrices have not been held against whole ones",
        "remove model.fp8, or parallel.tensor",
    ),
    Refusal(
        "training.torch_compile",
        lambda one: one.tensor > 1 and any(map(one.training.get, COMPILES)),
        "a compiled model with parallel.tensor has not been held against an uncompiled one",
        "remove torch_compile, or parallel.tensor",
    ),
    Refusal(
        "data.max_length",
        lambda one: one.is_packed and one.max_length % one.sequence > 0,
        "packed rows have this length, and each rank of parallel.sequence takes an equal part",
        "set it to a multiple of parallel.sequence",
    ),
    Refusal(
        "model.attn_implementation",
        lambda one: one.sequence > 1 and one.attention not in ("auto", "trainkit"),
        "with parallel.sequence ranks exchange heads for tokens around trainkit's own attention",
        "set it to auto",
    ),
    Refusal(
        "training.torch_compile",
        lambda one: one.sequence > 1 and any(map(one.training.get, COMPILES)),
        "a compiled model whose ranks share rows has not been held against an uncompiled one",
        "remove torch_compile, or parallel.sequence",
    ),
    Refusal(
        "parallel.sequence",
        lambda one: one.sequence > 1 and one.computes_fp8,
        "fp8 products of ranks that share rows have not been held against those of whole rows",
        "remove the fp8 products, or parallel.sequence",
    ),
    Refusal(
        "parallel.shard",
        lambda one: one.pipeline > 1 and one.shard not in (NONE, "fsdp2"),
        "ZeRO wraps a whole model and steps it itself; the ranks that share a pipeline's stage are "
        "DDP's or FSDP2's",
        "set shard: fsdp2, or remove it or parallel.pipeline",
    ),
    Refusal(
        "parallel.schedule",
        lambda one: _fsdp2(one) and one.schedule == "zbv",
        "zbv adds to the gradients of weights past autograd, where fsdp2 would gather and sum them",
        "set schedule: 1f1b or interleaved, or remove parallel.shard",
    ),
    *(
        Refusal(
            key,
            lambda one, key=key: one.schedule == "zbv" and one.offloads == key,  # type: ignore[misc]
            "zbv recomputes a stage as a whole, and layers' inputs are not there to be sent away",
            f"remove {key}, or set schedule: 1f1b or interleaved",
        )
        for key in ("recompute.offload", "lora.offload_activations")
    ),
    Refusal(
        "parallel.pipeline",
        lambda one: one.pipeline > 1 and (one.tensor > 1 or one.sequence > 1),
        "stages that are split further have not been held against one process",
        "remove parallel.pipeline, or the other direction",
    ),
    Refusal(
        "parallel.pipeline",
        lambda one: one.pipeline > 1 and one.computes_fp8,
        "fp8 products are chosen on a whole model, and a rank of a pipeline has its own layers",
        "remove the fp8 products, or parallel.pipeline",
    ),
    *(
        Refusal(
            key,
            lambda one, key=key: one.pipeline > 1 and key in one.routers,  # type: ignore[misc]
            "the routers of all layers have one loss together, and the last stage has its own only",
            f"remove {key}, or parallel.pipeline",
        )
        for key in ("model.router_aux_loss", "model.router_z_loss")
    ),
    Refusal(
        "objective",
        lambda one: one.pipeline > 1 and one.objective != "sft",
        "the last stage computes the loss of one forward pass, and other objectives may take more",
        "remove parallel.pipeline",
    ),
    Refusal(
        "objective",
        lambda one: one.objective == "reward" and one.shard not in ("none", "zero1", "zero2"),
        "ranks read their parts of a model from its files, and a scalar head is not in them yet",
        "set parallel.shard: zero2, or none",
    ),
    Refusal(
        "objective",
        lambda one: one.objective != "sft" and one.computes_fp8 and not one.has_adapters,
        "only over a frozen base in fp8 have objectives other than sft been held against fp64",
        "remove model.fp8, or train adapters with lora.quantize: fp8",
    ),
    Refusal(
        "objective",
        lambda one: one.objective != "sft" and (one.tensor > 1 or one.optim_in_backward),
        "objectives other than sft have not been held against fp64 with split products, or with "
        "steps in the backward pass",
        "remove parallel.tensor or optim_in_backward",
    ),
    Refusal(
        "training.optim",
        lambda one: (
            one.pipeline > 1 and one.training.get("optim") not in (None, *SHARDED_OPTIMIZERS)
        ),
        "the stages' states are saved by the names of weights, which has been held against one "
        "process for torch's own optimizers: " + ", ".join(SHARDED_OPTIMIZERS),
        "set training.optim: adamw_torch_fused, or remove parallel.pipeline",
    ),
    Refusal(
        "model.master_weights",
        lambda one: one.pipeline > 1 and not one.master_weights,
        "the stages' states are saved with fp32 masters",
        "remove master_weights, or parallel.pipeline",
    ),
    *(
        Refusal(
            key,
            lambda one, key=key: one.pipeline > 1 and one.lora == key,  # type: ignore[misc]
            why,
            f"remove {key}, or parallel.pipeline",
        )
        for key, why in (
            (
                "lora.init_lora_weights",
                "it starts from the weights of all layers, and a rank of a "
                "pipeline has its own only",
            ),
            (
                "lora.modules_to_save",
                "whole modules are saved with the adapters by one rank, and a "
                "rank of a pipeline has its own layers only",
            ),
        )
    ),
    Refusal(
        "lora.peft",
        lambda one: (
            one.lora == "lora.peft"
            and (one.shard != "none" or max(one.tensor, one.pipeline, one.sequence) > 1)
        ),
        "adapters of another kind have been held against one process alone",
        "remove the other keys of parallel: each GPU then holds the whole model",
    ),
    Refusal(
        "lora.adapter_dtype",
        lambda one: one.shard in ("zero3", "zero3_offload") and one.mixes_dtypes,
        "ZeRO-3 keeps what trains in one buffer, and the modules that train whole "
        "(lora.modules_to_save, model.add_tokens) have the base's dtype",
        "set lora.adapter_dtype: model, or take shard: zero2 or fsdp2",
    ),
    Refusal(
        "model.add_tokens",
        lambda one: one.adds_tokens and max(one.tensor, one.pipeline) > 1,
        "new rows of embedding and head begin from rows all over both, and with parallel.tensor or "
        "parallel.pipeline no rank holds them whole",
        "remove parallel.tensor or parallel.pipeline (shard: zero3 spreads a large model), or "
        "begin from a model that has the tokens",
    ),
    Refusal(
        "training.gradient_checkpointing_kwargs",
        lambda one: (
            one.pipeline > 1
            and bool((one.training.get("gradient_checkpointing_kwargs") or {}).get("use_reentrant"))
        ),
        "a stage's gradients pass re-entrant checkpointing by",
        "set use_reentrant: false",
    ),
    Refusal(
        "lora.quantize",
        lambda one: one.pipeline > 1 and one.quantize is not None,
        "a base is packed as a whole model, and a rank of a pipeline reads its own layers only",
        "remove lora.quantize, or parallel.pipeline",
    ),
    Refusal(
        "lora.quantize",
        lambda one: one.quantize == "int8" and one.shard != NONE,
        "codes in int8 are whole numbers, where shards are floats, and bitsandbytes takes none "
        "back from a checkpoint of DeepSpeed's",
        "remove parallel.shard, so that each GPU holds the base; or set lora.quantize: nf4",
    ),
    Refusal(
        "model.dtype",
        lambda one: (
            one.pipeline > 1 and (one.model_dtype == "float16" or bool(one.training.get("fp16")))
        ),
        "the loss scaler of fp16 would have to agree over the stages",
        "set model.dtype: bfloat16",
    ),
    Refusal(
        "training.torch_compile",
        lambda one: one.pipeline > 1 and any(map(one.training.get, COMPILES)),
        "compiled stages have not been held against an uncompiled model",
        "remove torch_compile, or parallel.pipeline",
    ),
    *(
        Refusal(
            f"training.{key}",
            lambda one, key=key, dtype=dtype: (  # type: ignore[misc]
                _deepspeed(one)
                and one.quantize is not None
                and bool(one.training.get(key))
                and one.model_dtype != dtype
            ),
            "DeepSpeed casts every weight to this dtype, and a packed base holds codes, which "
            "would become others",
            f"remove it, and write model.dtype: {dtype} if that is meant",
        )
        for key, dtype in (("bf16", "bfloat16"), ("fp16", "float16"))
    ),
    Refusal(
        "training.fp16",
        lambda one: (
            _fsdp2(one) and (one.model_dtype == "float16" or bool(one.training.get("fp16")))
        ),
        "fsdp2 keeps fp32 shards and has no loss scaler here, which fp16 needs",
        "set model.dtype: bfloat16, or parallel: {shard: zero3}",
    ),
    Refusal(
        "training.optim",
        lambda one: _fsdp2(one) and one.training.get("optim") not in (None, *SHARDED_OPTIMIZERS),
        "fsdp2 gives an optimizer parts of weights, which torch's own can take: "
        + ", ".join(SHARDED_OPTIMIZERS),
        "set training.optim: adamw_torch_fused, or parallel: {shard: zero2}",
    ),
    *(
        _no_flat_shards(with_reason=reason)
        for reason in dict.fromkeys(row.why_whole for row in OPTIMIZERS.values() if row.why_whole)
    ),
    Refusal(
        "optim_in_backward",
        lambda one: one.optim_in_backward and one.shard != NONE,
        "the engine reduces gradients after the backward pass has them, and steps its own shards",
        "remove optim_in_backward, or what shards the run",
    ),
    *(
        Refusal(
            key,
            lambda one, uses=uses: uses(one) and one.tensor * one.sequence * one.pipeline > 1,  # type: ignore[misc]
            "such an optimizer averages gradients by itself, over ranks that have whole rows and "
            "whole layers",
            f"remove {key}, or what splits the model in parallel",
        )
        for key, uses in (
            ("optim_in_backward", lambda one: one.optim_in_backward),
            ("training.optim", lambda one: one.training.get("optim") == "flat_adamw"),
        )
    ),
    Refusal(
        "model.master_weights",
        lambda one: not one.master_weights and one.shard != NONE,
        "the engine keeps fp32 masters in its shards, whatever the model does",
        "remove master_weights, or what shards the run",
    ),
    Refusal(
        "training.torch_compile",
        lambda one: _fsdp2(one) and any(map(one.training.get, COMPILES)),
        "a compiled model whose layers fsdp2 gathers has not been held against an uncompiled one",
        "remove torch_compile, or set parallel: {shard: zero2}",
    ),
    Refusal(
        "recompute",
        lambda one: one.tensor * one.sequence * one.pipeline > 1 and _chooses(one),
        "where ranks share a model's products, rows or layers, selective, every and budget_gib "
        "have not been held against one process",
        "write recompute: full or none",
    ),
    Refusal(
        "training.torch_compile",
        lambda one: (
            any(map(one.training.get, COMPILES))
            and one.recompute is not None
            and (
                one.recompute.selective
                or one.recompute.budget_gib is not None
                or one.recompute.offload is True
            )
        ),
        "a compiled model decides itself what of a layer is kept: selective, budget_gib and "
        "offload would not be seen by it",
        "remove torch_compile, or write recompute: full or {every: k}",
    ),
    Refusal(
        "training.load_best_model_at_end",
        lambda one: (
            _fsdp2(one)
            and bool(one.training.get("load_best_model_at_end"))
            and bool(one.training.get("save_only_model"))
        ),
        "with save_only_model fsdp2 keeps no fp32 shards to take the best weights from",
        "remove one of the two",
    ),
)


def refusals(combination: Combination) -> Iterator[Refusal]:
    return (row for row in REFUSALS if row.applies(combination))
