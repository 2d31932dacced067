"""Adapters that start from the base's own weights (PiSSA, OLoRA), and are saved as plain LoRA.

Such a start moves a part of the base into the adapter: with the first factors ``B0 A0`` the base
becomes ``W - s B0 A0``, and ``A`` and ``B`` as trained fit that base alone. What is written is
therefore the difference, over the untouched base: ``s (B A - B0 A0)``, an adapter of twice the
rank, which peft, ``merge``, ``generate`` and every server load as any other. Its first half is the
trained pair, so a run continues from it.

peft converts in the same way, if it is given the first factors on disk and an adapter without
rank-stabilised scaling; here the model keeps them, and the files are turned after peft wrote them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, PeftModelForCausalLM, set_peft_model_state_dict
from peft.tuners.lora.layer import Linear as PeftLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.integrations import gather_params_ctx
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from trainkit.errors import RecipeError

logger = logging.getLogger(__name__)

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
Factors = tuple[Tensor, Tensor]
"""A (r, in_features) and B (out_features, r)."""


def start_from_base(model: PeftModel, init: str, *, dtype: torch.dtype | None) -> None:
    """Take the adapters' first factors from the base, and take them out of the base.

    The base is reduced by the factors as they are stored, rounded to the adapter's dtype, so that
    the model starts as the base does, except for the rounding of the base's own dtype.

    Args:
        model: freshly adapted; its class becomes `SavedAsPlainLora`.
        init: "pissa", "pissa_niter_N" or "olora".
        dtype: of the adapters; None is float32.
    """
    (adapter,) = model.active_adapters
    initial = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        base: Any = layer.get_base_layer()
        if type(layer) is not PeftLinear or type(base) is not nn.Linear:
            raise RecipeError(
                f"init_lora_weights: {init} takes the weights of plain linear layers apart, and "
                f"{name} is a {type(base).__name__}",
                where="lora.init_lora_weights",
                fix="leave it out with lora.exclude_modules, or set init_lora_weights: true",
            )
        with gather_params_ctx(base.weight):
            initial[name] = _split_off(layer, adapter, init, dtype)
    if type(model) is not PeftModelForCausalLM:
        raise RecipeError(
            f"init_lora_weights: {init} is for causal language models, not for "
            f"{type(model).__name__}",
            where="lora.init_lora_weights",
        )
    model.__class__ = SavedAsPlainLora
    model.initial_factors = initial


@torch.no_grad()
def _split_off(layer: Any, adapter: str, init: str, dtype: torch.dtype | None) -> Factors:
    weight = layer.get_base_layer().weight
    if layer.r[adapter] > min(weight.shape):
        raise RecipeError(
            f"init_lora_weights: {init} needs a rank of at most {min(weight.shape)} for a weight "
            f"of {tuple(weight.shape)}; r is {layer.r[adapter]}",
            where="lora.r",
        )
    whole = weight.detach().clone()
    if init == "olora":
        layer.olora_init(adapter)
    else:
        layer.pissa_init(adapter, init)
    down, up = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    for factor in (down, up):
        factor.data = factor.data.to(dtype or torch.float32).contiguous()
    taken = layer.scaling[adapter] * (up.float() @ down.float())
    layer.get_base_layer().weight.data = (whole.float() - taken).to(whole.dtype)
    return down.detach().cpu().clone(), up.detach().cpu().clone()


class SavedAsPlainLora(PeftModelForCausalLM):
    """A peft model that writes plain LoRA over the untouched base, and reads it back.

    Attributes:
        initial_factors: of each adapted layer, by its name in this model; on the host.
    """

    initial_factors: dict[str, Factors]

    def save_pretrained(self, save_directory: str, **options: Any) -> None:
        """As peft does; then the difference to the base replaces the trained pair."""
        super().save_pretrained(save_directory, **options)
        directory = Path(save_directory)
        if options.get("is_main_process", True) and (directory / WEIGHTS).is_file():
            _write_difference(directory, self.initial_factors)

    def load_adapter(self, model_id: str, adapter_name: str, **options: Any) -> Any:
        """Take the trained pair out of a saved difference."""
        trained, initial = read_difference(Path(model_id))
        self._take_out(initial, adapter_name)
        return set_peft_model_state_dict(self, trained, adapter_name=adapter_name)

    @torch.no_grad()
    def _take_out(self, initial: Mapping[str, Factors], adapter: str) -> None:
        """Reduce the base by the run's own first factors, should other ones have been found.

        Another GPU or library may turn a singular vector round, or draw other ones.
        """
        num_other = 0
        for name, (down, up) in initial.items():
            own_down, own_up = self.initial_factors[name]
            if torch.equal(own_down, down) and torch.equal(own_up, up):
                continue
            num_other += 1
            layer: Any = self.get_submodule(name)
            weight = layer.get_base_layer().weight
            change = own_up.float() @ own_down.float() - up.float() @ down.float()
            change *= layer.scaling[adapter]
            weight.data = (weight.float() + change.to(weight.device)).to(weight.dtype)
            self.initial_factors[name] = (down, up)
        if num_other:
            logger.warning(
                "%d of %d layers were taken apart otherwise than when the run began (another "
                "device or library); the run's own factors are used, so what follows equals an "
                "uninterrupted run up to the rounding of the base",
                num_other,
                len(initial),
            )


def _write_difference(directory: Path, initial: Mapping[str, Factors]) -> None:
    tensors = load_file(directory / WEIGHTS)
    for name, (down, up) in initial.items():
        first, second = f"{name}.lora_A.weight", f"{name}.lora_B.weight"
        tensors[first] = torch.cat([tensors[first], down.to(tensors[first].dtype)])
        tensors[second] = torch.cat([tensors[second], -up.to(tensors[second].dtype)], dim=1)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    path = directory / CONFIG
    config = json.loads(path.read_text(encoding="utf-8"))
    # Twice the rank at the same scaling: alpha / r, or alpha / sqrt(r).
    config["lora_alpha"] *= 2**0.5 if config.get("use_rslora") else 2
    config["r"] *= 2
    config["init_lora_weights"] = True
    path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def read_difference(directory: Path) -> tuple[dict[str, Tensor], dict[str, Factors]]:
    """A saved difference, taken apart again.

    Returns:
        The adapter's tensors as they were trained, and each layer's first factors by its name.
    """
    tensors = load_file(directory / WEIGHTS)
    initial: dict[str, Factors] = {}
    for key in [key for key in tensors if key.endswith(".lora_A.weight")]:
        name = key.removesuffix(".lora_A.weight")
        down, up = tensors[key], tensors[f"{name}.lora_B.weight"]
        rank = down.shape[0] // 2
        initial[name] = (down[rank:].clone(), -up[:, rank:])
        tensors[key] = down[:rank].clone()
        tensors[f"{name}.lora_B.weight"] = up[:, :rank].clone()
    return tensors, initial
