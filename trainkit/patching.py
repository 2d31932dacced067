"""``trainkit.patch``: everything that trainkit can swap into a model, in one call."""

import sys
from collections.abc import Mapping

from torch import nn

from trainkit.errors import PatchError
from trainkit.models.patch import PatchReport, patch_kernels, refuse_unknown
from trainkit.options.model import LORA_OPS, OPS


def patch(model: nn.Module, kernels: bool | Mapping[str, bool] = True) -> PatchReport:
    """Swap trainkit's kernels into a loaded causal language model, in place.

    On a model with LoRA adapters the fused backward goes in as well. Call it before DeepSpeed, DDP
    or FSDP wrap the model. Either every swap is made or none is.

    Args:
        model: any causal language model of transformers, bare or wrapped by peft.
        kernels: True for all, False for none, or ``{"rope": False, ...}``; an op that is not
            mentioned is on where it is proved. The fused adapters have ops of their own:
            ``lora_mlp``, ``lora_qkv``, ``lora_linear``, ``lora_experts``.

    Returns:
        The report, with ``revert()``.

    Raises:
        PatchError: an op is unknown, or asked for by name and not proved; the model is patched
            already (by trainkit, which is refused rather than repeated, or by Liger).
    """
    if isinstance(kernels, bool):
        report = patch_kernels(model, kernels)
        fused: Mapping[str, bool] = dict.fromkeys(LORA_OPS, kernels)
    else:
        refuse_unknown(kernels, (*OPS, *LORA_OPS))
        report = patch_kernels(model, {op: on for op, on in kernels.items() if op in OPS})
        fused = {op: kernels.get(op, True) for op in LORA_OPS}
    adapters = sys.modules.get("peft.tuners.lora")  # until it is imported no model has any
    if not adapters or not any(isinstance(each, adapters.LoraLayer) for each in model.modules()):
        return report
    from trainkit.lora.fused import fuse

    try:
        report = report.joined(fuse(model, [op for op, on in fused.items() if on]))
        for row in report.rows:
            if row.status == "off" and not isinstance(kernels, bool) and kernels.get(row.op):
                raise PatchError(f"{row.op} cannot be switched on: {row.reason}", where="kernels")
    except PatchError:
        report.revert()
        raise
    return report
