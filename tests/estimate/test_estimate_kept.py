"""What layers on a CPU really keep for the backward pass, against the step without numbers."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trainkit.estimate.job import Job
from trainkit.estimate.record import record

TOKENS = 128
OF_TEXT = (
    "llama", "glm4", "phi3", "gemma3_text", "olmo2", "qwen3", "granite", "cohere2", "gpt_neox",
)  # fmt: skip


def _kept(family: str, layers: int) -> tuple[int, Any]:
    """Bytes of all tensors that autograd keeps besides parameters, and the model's config."""
    config = AutoConfig.for_model(
        family,
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
    with hooks, torch.enable_grad():
        model(input_ids=ids, use_cache=False)
    return sum(kept.values()), config


@pytest.mark.parametrize("family", OF_TEXT)
def test_a_layer_keeps_what_is_recorded(family: str) -> None:
    """But for its own result, which autograd keeps where the next layer's norm reads it."""
    fewer, _ = _kept(family, 1)
    more, config = _kept(family, 2)
    job = Job(config.to_json_string(use_diff=False))
    layer = record(job, 1, TOKENS).kinds[-1]
    assert abs(layer.kept - (more - fewer)) <= layer.output + 0.015 * layer.kept
