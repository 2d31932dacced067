"""Whether a model takes what a recipe asks of it, by its configuration alone: no weight is read.

``sft`` asks before it reads data, and ``new`` writes only what is not refused here.
"""

from collections.abc import Mapping

from transformers import PreTrainedConfig

from trainkit.errors import ModelError, PatchError
from trainkit.lora.quant import refuse_unpacked_experts
from trainkit.lora.targets import resolve_and_check
from trainkit.models.attention.packable import refuse_recurrent, skeleton_of
from trainkit.models.patch import patch_kernels
from trainkit.options import LoraOptions
from trainkit.options.model import OPS


def refuse_unfit_model(
    config: PreTrainedConfig,
    *,
    packing: bool,
    kernels: bool | Mapping[str, bool],
    lora: LoraOptions | None,
) -> None:
    """Hold a recipe against the model's modules and shapes.

    Args:
        config: of the model.
        packing: several documents share a row.
        kernels: all, none, or per op.
        lora: adapters, or None for full fine-tuning.

    Raises:
        ModelError: its layers cannot keep documents apart, or a name matches no module.
        PatchError: there are no kernels for it.
        RecipeError: adapters of this size are none.
    """
    if packing:
        refuse_recurrent(config)
    skeleton = skeleton_of(config)
    if skeleton is None:
        return  # its own code: judged when it is loaded
    if lora is not None:
        resolve_and_check(skeleton, lora)
    if kernels is not False:
        own = kernels if kernels is True else {op: on for op, on in kernels.items() if op in OPS}
        patch_kernels(skeleton, own).revert()


def settings_for(config: PreTrainedConfig, method: str) -> dict[str, bool]:
    """What a new recipe switches off for a model: what ``sft`` would refuse.

    Args:
        config: of the model.
        method: ``full``, ``lora`` or ``qlora``.

    Raises:
        TrainkitError: the method itself is refused for this model.
    """
    off: dict[str, bool] = {}
    for key, packing in (("data.packing", True), ("kernels", False)):
        try:
            refuse_unfit_model(config, packing=packing, kernels=not packing, lora=None)
        except (ModelError, PatchError):
            off[key] = False
    if not getattr(config.get_text_config(), "rope_parameters", None):
        # Tables of positions and slopes often go by the place in the row: `sft` proves it on the
        # weights, and here there are none.
        off["data.packing"] = False
    if method != "full":
        refuse_unfit_model(config, packing=False, kernels=False, lora=LoraOptions())
    if method == "qlora":
        refuse_unpacked_experts(config, config.model_type)
    return off
