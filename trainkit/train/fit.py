"""Whether a model takes what a recipe asks of it, by its configuration alone: no weight is read.

``sft`` asks before it reads data, and ``new`` writes only what is not refused here.
"""

from collections.abc import Mapping, Sequence

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.trainer_utils import check_target_module_exists

from trainkit.errors import ModelError, RecipeError
from trainkit.models.attention.packable import refuse_recurrent, skeleton_of
from trainkit.models.context import context_of, table_of
from trainkit.models.loading import can_set_attention
from trainkit.options import Fp8Options, LoraOptions
from trainkit.options.model import OPS
from trainkit.options.parallel import RecomputeOptions
from trainkit.options.section import ask, nearest
from trainkit.options.training import PAIRED
from trainkit.patterns import refuse_endless


def refuse_unfit_model(
    config: PreTrainedConfig,
    *,
    packing: bool,
    kernels: bool | Mapping[str, bool],
    lora: LoraOptions | None,
    fp8: bool | str | Fp8Options = False,
    projected: str | Sequence[str] | None = None,
    recompute: RecomputeOptions | None = None,
) -> None:
    """Hold a recipe against the model's modules and shapes."""
    if packing:
        apart = kernels if isinstance(kernels, bool) else kernels.get("gated_delta_rule", True)
        refuse_recurrent(config, apart=apart)
    every = None if recompute is None else recompute.every
    named = None if projected in ("all-linear", "all_linear") else projected
    wanted = Fp8Options.of(fp8)
    ops = {} if isinstance(kernels, bool) else {op: kernels[op] for op in OPS if op in kernels}
    asks = lora is not None or every is not None or wanted or named is not None or any(ops.values())
    skeleton = skeleton_of(config) if asks else None
    if skeleton is None:
        return  # nothing is asked of its modules; or its own code: judged when it is loaded
    if lora is not None:
        from trainkit.lora.targets import resolve_and_check

        resolve_and_check(skeleton, lora)
        if lora.quantize is not None:
            from trainkit.lora.quant import refuse_unpackable

            refuse_unpackable(skeleton, lora)
    if every is not None:
        _refuse_every(skeleton, every)
    if wanted is not None:
        from trainkit.models.fp8.choice import find_candidates

        find_candidates(skeleton, wanted, frozen=lora is not None)
    if named is not None:
        _refuse_unmatched(skeleton, named)
    if any(ops.values()):
        from trainkit.models.patch import patch_kernels

        patch_kernels(skeleton, ops).revert()


def context_warning(
    config: PreTrainedConfig, max_length: int, whose: str = "the model"
) -> str | None:
    """What to say where samples may be longer than the model's context; None where they cannot."""
    context = context_of(config.to_dict())
    if context is None or max_length <= context:
        return None
    said = f"data.max_length {max_length} is beyond {whose}'s context of {context} tokens"
    if table_of(config.get_text_config().to_dict(), skeleton_of(config)) is not None:
        raise ModelError(
            f"{said}, and it has no positions behind them",
            where="data.max_length",
            fix=f"set data.max_length={context} or less",
        )
    return (
        f"{said} (max_position_embeddings with its rope scaling): longer samples train positions "
        f"that it never saw; set data.max_length={context} or less, or give its config.json a rope "
        "scaling"
    )


def _refuse_every(model: PreTrainedModel, k: int) -> None:
    """Beyond the last layer only the first would be recomputed, whatever the number says."""
    layers = sum(isinstance(each, GradientCheckpointingLayer) for each in model.modules())
    if 0 < layers < k:  # without any: refused by what recomputes, which says why
        raise RecipeError(
            f"recompute: {{every: {k}}} means layers 0, {k}, ..., and the model has {layers}",
            where="recompute.every",
            fix=f"write a number from 1 (all layers) to {layers} (the first alone), or "
            "recompute: none",
        )


def _refuse_unmatched(model: PreTrainedModel, projected: str | Sequence[str]) -> None:
    """Names as transformers compares them: a pattern over full names, or a list of their parts."""
    where = "training.optim_target_modules"
    linears = [name for name, each in model.named_modules() if isinstance(each, nn.Linear)]
    patterns = [projected] if isinstance(projected, str) else list(projected)
    refuse_endless({"target_modules": "|".join(patterns)}, linears, where, ModelError)
    for each in patterns:
        one = each if isinstance(projected, str) else [each]
        if not any(check_target_module_exists(one, name) for name in linears):
            roles = sorted({name.rpartition(".")[2] for name in linears})
            raise ModelError(
                f"{each!r} matches no linear layer",
                where=where,
                fix=f"{ask(nearest(each, roles)) or ''} the layers are {', '.join(roles)}".strip(),
            )


def settings_for(config: PreTrainedConfig, method: str) -> dict[str, bool]:
    """What a new recipe has on or off for a model: off is what ``sft`` would refuse."""
    found: dict[str, bool] = {}
    try:
        refuse_unfit_model(config, packing=True, kernels=False, lora=None)
    except ModelError:
        found["data.packing"] = False
    text = config.get_text_config()
    towers = ("vision", "audio")
    stacks = [
        key
        for key, each in vars(text).items()
        if hasattr(each, "num_hidden_layers") and not key.startswith(towers)
    ]
    if stacks or not getattr(text, "rope_parameters", None):
        # A stack over patches of the row, as blt's, and tables of positions and slopes often go by
        # the whole row: `sft` proves it on the weights, and here there are none.
        found["data.packing"] = False
    if method in PAIRED and not found and _shares_prompts(config):
        found["preference.share_prompts"] = True
    if method != "full":
        lora = LoraOptions(quantize={"qlora": "nf4", "fp8": "fp8"}.get(method))
        refuse_unfit_model(config, packing=False, kernels=False, lora=lora)
    return found


def _shares_prompts(config: PreTrainedConfig) -> bool:
    """Whether two answers may attend to one prompt: by trainkit's attention, in a model of text.

    Attention that chooses its keys by an index, and what looks none up, has another one.
    """
    is_text = config.get_text_config() is config
    by_index = any(key.startswith("index_") for key in vars(config))
    return is_text and not by_index and can_set_attention(config)
