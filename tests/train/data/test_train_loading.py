"""Where a model is loaded from, and what is written of that place."""

import json

import pytest

from trainkit.lora.adapter import LoraOptions, attach
from trainkit.models.loading import load_model
from trainkit.models.tokenizer import from_pretrained_arguments
from trainkit.options import ModelOptions


@pytest.mark.parametrize("name", ["base", "./base", "~/base"])
def test_an_adapter_finds_its_base_from_any_directory(name, tiny_qwen2, tmp_path, monkeypatch):
    """A relative name would be looked up in the next working directory, and then on the hub."""
    (tmp_path / "base").symlink_to(tiny_qwen2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    model = attach(load_model(ModelOptions(name, dtype="auto"), attention="sdpa"), LoraOptions(r=2))
    model.save_pretrained(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")


def test_a_hub_name_stays_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert from_pretrained_arguments(ModelOptions("org/name"))[0] == "org/name"


def test_a_gguf_file_is_split_into_its_directory_and_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place, options = from_pretrained_arguments(ModelOptions("x/model.gguf"))
    assert (place, options["gguf_file"]) == (str(tmp_path / "x"), "model.gguf")
