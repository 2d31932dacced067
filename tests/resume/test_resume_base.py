"""A continued run stands on the base that it was begun on, to the byte; else it names the file."""

import json
import shutil

import pytest
from project import RECIPE

from trainkit.checkpoint.whole.manifest import MANIFEST_NAME, Manifest, read_manifest

LORA = "lora: {r: 4, alpha: 8}\n"
CHANGES = {
    "config.json": ('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'),
    "generation_config.json": ("{", '{"temperature": 0.5,'),
}


@pytest.fixture
def begun(project, tiny_llama, request):
    """A run of four steps over a copy of the model."""
    (project.root / "m").unlink()
    shutil.copytree(tiny_llama, project.root / "m")
    text = RECIPE if request.param == "lora" else RECIPE.replace(LORA, "")
    (project.root / "r.yaml").write_text(text)
    said = project.sft("--config", "r.yaml", "--output-dir", "run", "training.max_steps=2")
    assert said.code == 0, said.err
    return project


def resumed(project, *arguments):
    return project.sft("--resume", "run", "training.max_steps=4", *arguments)


@pytest.mark.parametrize("begun", ["lora", "full"], indirect=True)
def test_what_the_base_is_made_of_is_compared(begun):
    for name, (old, new) in CHANGES.items():
        path = begun.root / "m" / name
        whole = path.read_text()
        assert old in whole
        path.write_text(whole.replace(old, new, 1))
        refused = resumed(begun)
        assert refused.code == 1
        assert f"base.{name}: " in refused.err
        assert "--allow-changed base" in refused.err
        path.write_text(whole)
    assert resumed(begun).code == 0


@pytest.mark.parametrize("begun", ["lora"], indirect=True)
def test_the_weights_under_an_adapter_are_compared(begun):
    path = begun.root / "m" / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
    refused = resumed(begun)
    assert refused.code == 1
    assert "base.model.safetensors: " in refused.err
    taken = resumed(begun, "--allow-changed", "base")
    assert taken.code == 0, taken.err
    assert "not as it was, and accepted: base.model.safetensors" in taken.err + taken.out


@pytest.mark.parametrize("begun", ["full"], indirect=True)
def test_a_run_of_before_goes_on_with_a_word(begun):
    """Its checkpoint says nothing of the base's files."""
    checkpoint = begun.root / "run" / "checkpoint-2"
    manifest = read_manifest(checkpoint)
    metadata = json.loads(json.dumps(manifest.metadata))
    del metadata["run"]["base"]
    (checkpoint / MANIFEST_NAME).write_bytes(Manifest(manifest.files, metadata).to_bytes())
    said = resumed(begun)
    assert said.code == 0, said.err
    assert "is of an older trainkit" in said.out + said.err
