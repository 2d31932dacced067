"""Checkpoints that cannot be converted exactly are refused, with the reason."""

import json

import pytest
import torch
from convert_cases import change_config
from safetensors.torch import save_file
from tiny_glm import chatglm_config, chatglm_tensors, write_chatglm

from trainkit.checkpoint.convert.convert import ConvertOptions, convert_model
from trainkit.errors import CheckpointError


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model_type": "glm4"}, "norms after attention"),
        ({"model_type": "glm4_moe"}, "mixture-of-experts"),
        ({"model_type": "llama"}, "known are chatglm, glm, qwen2"),
        ({"rmsnorm": False}, "layer norms"),
        ({"post_layer_norm": False}, "norm after the last layer"),
        ({"apply_residual_connection_post_layernorm": True}, "residual"),
        ({"add_bias_linear": True}, "no such bias"),
        ({"add_qkv_bias": False}, "would not use them"),
        ({"add_qkv_bias": 1}, "not a switch"),
        ({"original_rope": False}, "in neighbours"),
        ({"interleaved_qkv": True}, "all heads apart"),
        ({"num_layers": "many"}, "not a number"),
        ({"ffn_hidden_size": 81}, "does not fit the sizes"),
        ({"padded_vocab_size": 97}, "would have shape"),
        ({"kv_channels": 16}, "do not make up the hidden size"),
        ({"num_layers": 4}, "missing"),
        ({"num_layers": 2}, "without a rule"),
        ({"num_layers": 10**9}, "not possible"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"tie_word_embeddings": "no"}, "not a switch"),
        ({"eos_token_id": "<|user|>"}, "not a token id"),
        ({"eos_token_id": [1, -2]}, "not a token id"),
        ({"attention_dropout": "none"}, "not a number"),
        ({"hidden_size": 4 * 10**9, "kv_channels": 10**9}, "not possible"),
    ],
)
def test_refused_with_the_reason(glm, tmp_path, change, word):
    write_chatglm(glm, tmp_path / "source")
    config = {**chatglm_config(glm), **change}
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=word):
        convert_model(tmp_path / "source", tmp_path / "target", "qwen2", ConvertOptions())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_config_and_files_that_contradict_each_other(glm, tmp_path):
    source = write_chatglm(glm, tmp_path / "source")
    change_config(source, {"tie_word_embeddings": True})
    with pytest.raises(CheckpointError, match="differs from"):
        convert_model(source, tmp_path / "qwen2", "qwen2", ConvertOptions())


HEAD = "transformer.output_layer.weight"


@pytest.mark.parametrize(
    ("change", "options", "word"),
    [
        (lambda t: t.fill_(1e6), {"dtype": "float16", "verify": False}, "which float16 cannot"),
        (lambda t: t.to(torch.int8), {"verify": False}, "int8: quantised"),
        (lambda t: t.to(torch.float8_e4m3fn), {"verify": False}, "float8_e4m3fn: quantised"),
        (lambda t: t.fill_(torch.nan), {}, "NaN or infinite"),
    ],
    ids=["too-large-for-the-dtype", "int8", "float8", "nan"],
)
def test_weights_that_would_be_lost_are_refused(glm, tmp_path, change, options, word):
    tensors = chatglm_tensors(glm)
    tensors[HEAD] = change(tensors[HEAD].clone())
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(chatglm_config(glm)))
    with pytest.raises(CheckpointError, match=word):
        convert_model(tmp_path, tmp_path / "target", "qwen2", ConvertOptions(**options))
    assert not (tmp_path / "target").exists()


def test_unknown_and_missing_keys_are_listed(glm, tmp_path):
    tensors = chatglm_tensors(glm)
    tensors["transformer.prefix_encoder.weight"] = torch.zeros(2)
    del tensors["transformer.encoder.layers.1.mlp.dense_4h_to_h.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(chatglm_config(glm)))
    with pytest.raises(CheckpointError) as caught:
        convert_model(tmp_path, tmp_path / "target", "qwen2", ConvertOptions())
    assert "transformer.encoder.layers.1.mlp.dense_4h_to_h.weight" in str(caught.value)
    assert "transformer.prefix_encoder.weight" in str(caught.value)


def test_plain_qwen2_has_no_way_back(tiny_qwen2, tmp_path):
    with pytest.raises(CheckpointError, match="not that of a converted GLM-4"):
        convert_model(tiny_qwen2, tmp_path / "t", "glm", ConvertOptions())
