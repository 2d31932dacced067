"""Makers of tiny random GLM checkpoints in both layouts."""

import json
from pathlib import Path

FAR = 131072


def glm_model(*, seed=0, **overrides):
    """A random GLM with heads of 32, norms and biases away from their trivial start values."""
    import torch
    from transformers import GlmConfig, GlmForCausalLM

    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 96,
        "hidden_size": 128,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": FAR,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "partial_rotary_factor": 0.5,
        },
        "pad_token_id": 0,
        "eos_token_id": [1, 2, 3],
    }
    model = GlmForCausalLM(GlmConfig(**{**sizes, **overrides})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.5 if name.endswith("bias") else 0.15)
    return model


def chatglm_tensors(model):
    """The remote-code layout of a GLM's weights, put together by hand."""
    import torch

    state = model.state_dict()
    tensors = {
        "transformer.embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
        "transformer.encoder.final_layernorm.weight": state["model.norm.weight"],
        "transformer.output_layer.weight": state["lm_head.weight"],
        "transformer.rotary_pos_emb.inv_freq": torch.arange(8).to(torch.bfloat16),
    }
    for layer in range(model.config.num_hidden_layers):
        old, new = f"model.layers.{layer}.", f"transformer.encoder.layers.{layer}."
        for kind in ("weight", "bias"):
            parts = [state[f"{old}self_attn.{part}_proj.{kind}"] for part in "qkv"]
            tensors[f"{new}self_attention.query_key_value.{kind}"] = torch.cat(parts)
        for theirs, ours in (
            ("self_attention.dense", "self_attn.o_proj"),
            ("mlp.dense_h_to_4h", "mlp.gate_up_proj"),
            ("mlp.dense_4h_to_h", "mlp.down_proj"),
            ("input_layernorm", "input_layernorm"),
            ("post_attention_layernorm", "post_attention_layernorm"),
        ):
            tensors[f"{new}{theirs}.weight"] = state[f"{old}{ours}.weight"]
    return {name: tensor.clone().contiguous() for name, tensor in tensors.items()}


def chatglm_config(model):
    """The remote-code config of a GLM, with the entries that the published one has."""
    config = model.config
    return {
        "architectures": ["ChatGLMModel"],
        "model_type": "chatglm",
        "auto_map": {"AutoConfig": "configuration_chatglm.ChatGLMConfig"},
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "apply_query_key_layer_scaling": True,
        "apply_residual_connection_post_layernorm": False,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "ffn_hidden_size": config.intermediate_size,
        "fp32_residual_connection": False,
        "hidden_size": config.hidden_size,
        "kv_channels": config.head_dim,
        "layernorm_epsilon": config.rms_norm_eps,
        "multi_query_attention": True,
        "multi_query_group_num": config.num_key_value_heads,
        "num_attention_heads": config.num_attention_heads,
        "num_layers": config.num_hidden_layers,
        "original_rope": True,
        "padded_vocab_size": config.vocab_size,
        "post_layer_norm": True,
        "rmsnorm": True,
        "rope_ratio": config.rope_parameters["rope_theta"] / 10000,
        "seq_length": config.max_position_embeddings,
        "tie_word_embeddings": False,
        "eos_token_id": [1, 2, 3],
        "pad_token_id": 0,
    }


def write_chatglm(model, directory: Path) -> Path:
    from safetensors.torch import save_file

    directory.mkdir(parents=True)
    save_file(chatglm_tensors(model), directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(chatglm_config(model)))
    return directory
