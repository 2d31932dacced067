"""A quantised base: what it cannot be, and one whose linear layers are packed once it is read."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from trainkit.errors import RecipeError
from trainkit.kernels.fp8.function import why_no_fp8
from trainkit.lora.read_weights import read_weights
from trainkit.models.fp8.choice import Fp8Choice
from trainkit.models.fp8.decide import Fp8Setup, decide, refuse_too_large
from trainkit.models.fp8.trained import swap_in
from trainkit.models.frozen import outside_text
from trainkit.models.linears import expert_parameters, packed_kind, skipped_layers
from trainkit.models.loading import load_model, move
from trainkit.models.packed_experts import pack_experts, quantize_with_experts
from trainkit.models.vocabulary import vocabulary_ends
from trainkit.options import LoraOptions, ModelOptions
from trainkit.options.model import ALL
from trainkit.parallel.parameters import made_whole


def refuse_unfit_device(quantize: str, device: torch.device) -> None:
    """Refuse a kind without its package, and fp8 where it cannot run, before anything is loaded."""
    if packed_kind(quantize).name != "fp8":
        return
    if reason := why_no_fp8(device):
        raise RecipeError(reason, where="lora.quantize", fix="set lora.quantize: nf4, or remove it")


def packs_experts(empty: nn.Module, lora: LoraOptions) -> bool:
    """Whether there are experts to pack, which transformers' own loading leaves as they are."""
    packs = lora.quantize_experts and packed_kind(str(lora.quantize)).packs_experts
    return packs and bool(expert_parameters(empty))


def refuse_unpackable(model: PreTrainedModel, lora: LoraOptions) -> None:
    """Refuse to pack a layer whose weight the model reads itself: it would read codes."""
    away, skipped = outside_text(model), skipped_layers(model, lora.quantize_skip)
    head = model.get_output_embeddings()
    if lora.quantize_head and (head is None or head.weight is model.get_input_embeddings().weight):
        raise RecipeError(
            "the output layer is the embedding, which is read by rows and stays in 16 bits",
            where="lora.quantize_head",
            fix="remove it",
        )
    for name, holder in read_weights(model, packed=lora.quantize != "fp8").items():
        if f"{name}.weight" not in away and model.get_submodule(name) is not head:
            if name in skipped:
                continue
            raise RecipeError(
                f"{lora.quantize} packs {name}, and {holder} multiplies by its weight itself: "
                "packed, that is codes and no numbers",
                where="lora.quantize",
                fix="remove lora.quantize: adapters train over this model's own weights"
                if lora.quantize == "fp8"
                else f"leave it in 16 bits: lora.quantize_skip: [{name.rpartition('.')[2]}]",
            )


def packed_base(
    source: ModelOptions,
    lora: LoraOptions,
    fp8: Fp8Setup | None,
    device: torch.device,
    attention: str,
) -> tuple[PreTrainedModel, Fp8Choice | None]:
    """Read on the host and packed layer by layer: the device never holds it in 16 bits."""
    convert = packed_kind(str(lora.quantize)).convert
    # Every rank reads the whole base, which ZeRO-3 shards as codes, once it has the model.
    with made_whole():
        model: Any = load_model(source, attention=attention)
    kept = [*lora.modules_to_save, *(vocabulary_ends(model) if source.adds_tokens else ())]
    if convert is None:
        quantize_with_experts(model, device, lora, kept)
        return model.to(device), None
    # All of them: what is measured are linear layers.
    kept += pack_experts(model, "fp8", device, kept)
    if fp8 is None:
        convert(model, device, kept)
        return model.to(device), None
    if fp8.options.loss_budget != ALL:
        refuse_too_large(model, device)
        move(model, device)  # what rounding costs is measured on the plain model
    choice = decide(model, fp8, device, frozen=True, whole=kept)
    head = model.get_output_embeddings()
    both = [
        name
        for name, directions in choice.directions.items()
        if all(directions) and model.get_submodule(name) is not head  # whose loss reads 16 bits
    ]
    kept += [name for name, _ in model.named_modules() if name and name not in both]
    if both:
        convert(model, device, kept)
    swap_in(model, {name: each for name, each in choice.directions.items() if name not in both})
    return model.to(device), choice
