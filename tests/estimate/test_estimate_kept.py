"""What plain transformers' layers really keep for the backward pass, against what is counted."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trainkit.estimate import peak as counts
from trainkit.estimate.plan import Adapters, Plan
from trainkit.estimate.shape import TRAITS, from_config

TOKENS, RANK = 128, 8
OF_TEXT = [family for family in TRAITS if family != "qwen2_vl"]
"""Qwen2-VL's decoder is Qwen2's."""


def _kept(family: str, layers: int, *, lora: bool) -> tuple[int, Any]:
    """Bytes of all tensors that autograd keeps besides parameters, and the model's config."""
    config = AutoConfig.for_model(
        family + ("_text" if family == "gemma3" else ""),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    model: Any = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).train()
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=RANK, target_modules="all-linear"))
    own = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    ids = torch.arange(TOKENS)[None] % 60 + 2
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=lora):
        model(input_ids=ids, use_cache=False)
    return sum(kept.values()), config


@pytest.mark.parametrize(
    ("family", "lora"),
    [*((family, False) for family in OF_TEXT), *((f, True) for f in ("qwen3", "phi3", "gemma3"))],
)
def test_a_layer_keeps_what_is_counted(family: str, lora: bool) -> None:
    fewer, _ = _kept(family, 1, lora=lora)
    more, config = _kept(family, 2, lora=lora)
    adapters = Adapters(rank=RANK) if lora else None
    shape = from_config(config.to_dict(), family)
    plan = Plan(shape, 1, TOKENS, ops=frozenset(), adapters=adapters)
    # Autocast's copy of the adapters themselves; they are small next to real rows.
    copies = 2 * plan.adapter_numbers_per_layer
    found = (more - fewer - copies) / TOKENS
    assert counts.kept_per_token(plan) == pytest.approx(found, rel=0.015)
