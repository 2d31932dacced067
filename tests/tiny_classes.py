"""A tiny random model of any causal-LM class of transformers, to try attention on."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import configuration_auto as auto_config
from transformers.models.auto import modeling_auto as auto_model

_WINDOW = 8
_WIDTH = 64
_LAYERS = 4
_MAX_PARAMETERS = 20_000_000

_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size",), 128),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "emb_dim",
                     "word_embed_proj_dim", "lru_width", "embedding_dim",
                     "hidden_size_per_layer_input"), _WIDTH),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers",
                     "num_decoder_layers"), _LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads",
                     "decoder_attention_heads", "num_decoder_attention_heads",
                     "linear_num_value_heads", "num_key_value_groups"), 4),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "rotary_dim", "attention_head_size", "dim_head",
                     "global_head_dim", "swa_head_dim", "linear_key_head_dim",
                     "linear_value_head_dim", "index_head_dim"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "n_inner", "d_ff",
                     "moe_intermediate_size", "shared_expert_intermediate_size", "dim_ff",
                     "intermediate_size_mlp", "shared_intermediate_size", "ffn_hidden_size",
                     "expert_ffn_hidden_size", "dense_intermediate_size",
                     "moe_shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts",
                     "index_n_heads"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token",
                     "num_selected_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_groups", "n_shared_experts",
                     "first_k_dense_replace"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 32),
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "qk_head_dim": 24, "v_head_dim": 12,
    "swa_v_head_dim": 12,
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "index_topk", "window_size",
                     "attention_window_size"), _WINDOW),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 128),
    **dict.fromkeys(("mamba_d_state", "state_size", "mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 8),
    "vocab_size_per_layer_input": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "use_sliding_window": True, "max_window_layers": 1, "is_decoder": True, "use_cache": False,
    "use_mamba_kernels": False, "num_kv_shared_layers": 0, "image_token_id": 120,
}  # fmt: skip
"""What makes a model small, by the names that configurations use."""


_EXTRA: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "reformer": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [8, 16]},
    "blt": {"encoder_hash_byte_group_vocab": 128},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2},
    "plbart": {"encoder_attention_heads": 4},
    "whisper": {"encoder_attention_heads": 4},
    "marian": {"decoder_vocab_size": 128},
    "xmod": {"default_language": "en_XX"},
}
"""What single configurations need beyond sizes."""


def make_tiny(config_class: type[PreTrainedConfig], model_class: type[Any], **extra: Any) -> Any:
    """Build a model of a few thousand parameters in fp32, every parameter off its neutral value.

    Args:
        config_class: of the model.
        model_class: the causal language model.
        extra: settings of the (text) configuration beyond the common ones.

    Raises:
        Exception: whatever the class says about sizes that it does not take.
    """
    config = tiny_config(config_class, extra)
    if isinstance(text := config.get_text_config(decoder=True), model_class.config_class):
        config = text
    with torch.device("meta"):
        num_parameters = sum(each.numel() for each in model_class(config).parameters())
    if num_parameters > _MAX_PARAMETERS:
        raise ValueError(
            f"{num_parameters / 1e6:.0f} M parameters at the smallest sizes known here"
        )
    torch.manual_seed(0)
    model: PreTrainedModel = model_class(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            # Attention must show: with transformers' 0.02 its scores would be all but equal.
            spread = 0.3 if parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5
            noise = torch.randn(parameter.shape, generator=generator) * spread
            parameter.copy_(parameter + noise if parameter.dim() == 1 else noise)
    return model.eval()


def tiny_config(config_class: type[PreTrainedConfig], extra: dict[str, Any]) -> PreTrainedConfig:
    """The configuration at tiny sizes, its parts included."""
    default = config_class()
    extra = {**_EXTRA.get(config_class.model_type, {}), **extra}
    names = {**vars(default), **dict.fromkeys(config_class.attribute_map)}
    sizes = {name: value for name, value in _SIZES.items() if name in names}
    for name in getattr(config_class, "sub_configs", {}):
        inner = getattr(default, name, None)
        if inner is not None and isinstance(inner, PreTrainedConfig):
            settings = extra if inner is default.get_text_config(decoder=True) else {}
            sizes[name] = tiny_config(type(inner), settings)
    if "kv_lora_rank" in names:
        # Latent attention has no groups, and its rotary part alone is turned.
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
        sizes["head_dim"] = sizes.get("qk_rope_head_dim", sizes.get("head_dim"))
    if default.get_text_config(decoder=True) is default:
        sizes.update(extra)
    return config_class(**sizes)


class _Classes(Mapping[str, tuple[type[PreTrainedConfig], type[Any]]]):
    """Each is imported when it is asked for: all of them take five seconds."""

    def __getitem__(self, name: str) -> tuple[type[PreTrainedConfig], type[Any]]:
        config = auto_config.CONFIG_MAPPING[name]
        return config, auto_model.MODEL_FOR_CAUSAL_LM_MAPPING[config]

    def __iter__(self) -> Iterator[str]:
        names = auto_model.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        return (name for name in names if name != "gpt-sw3")  # gpt2's by another name

    def __len__(self) -> int:
        return sum(1 for _ in self)


def classes() -> Mapping[str, tuple[type[PreTrainedConfig], type[Any]]]:
    """Every causal-LM class of the installed transformers, by its ``model_type``."""
    return _Classes()
