"""`import trainkit.replace_kernel` patches what is loaded afterwards, until it is undone."""

import importlib
import sys

import pytest
import torch
import transformers
from families.family_models import make
from transformers import AutoModelForCausalLM, PreTrainedModel

from trainkit.errors import PatchError
from trainkit.models.swap import plain_class

PACKAGE = "trainkit.replace_kernel"


@pytest.fixture
def fresh_import():
    """Imports modules of the package as a new process would, and undoes it in the end."""

    def purge():
        for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
            del sys.modules[name]

    purge()
    doors = [PreTrainedModel.__dict__[door] for door in ("from_pretrained", "_from_config")]
    yield importlib.import_module
    sys.modules[f"{PACKAGE}.loading"].undo()
    purge()
    after = [PreTrainedModel.__dict__[door] for door in ("from_pretrained", "_from_config")]
    assert after == doors


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory per family with a tiny model."""
    root = tmp_path_factory.mktemp("saved")
    for name in ("llama", "qwen2", "phi3"):
        make(name).save_pretrained(root / name)
    return root


def is_patched(model):
    return plain_class(model.get_decoder().norm) is not type(model.get_decoder().norm)


def test_importing_the_package_patches_every_family_loaded_later(saved, fresh_import):
    before = AutoModelForCausalLM.from_pretrained(saved / "llama")
    package = fresh_import(PACKAGE)
    assert not is_patched(before)
    for name in ("llama", "qwen2", "phi3"):
        assert is_patched(AutoModelForCausalLM.from_pretrained(saved / name))
    assert is_patched(AutoModelForCausalLM.from_config(before.config))
    model, info = AutoModelForCausalLM.from_pretrained(saved / "llama", output_loading_info=True)
    assert is_patched(model)
    assert not info["missing_keys"]
    assert package.report_of(model).plan.model_type == "llama"
    off = {row.op for row in package.report_of(model).rows if row.status != "on"}
    assert off == {"layer_norm", "add_layer_norm", "gated_rms_norm", "experts", "gated_delta_rule"}


def test_parts_that_a_model_builds_of_others_are_not_patched_by_themselves(fresh_import):
    """A text model within a vision model comes through the same loader."""
    package = fresh_import(PACKAGE)
    config = transformers.LlavaConfig(
        text_config=make("llama").config,
        vision_config={"model_type": "clip_vision_model", "hidden_size": 32, "num_hidden_layers": 1,
                       "intermediate_size": 32, "num_attention_heads": 2, "image_size": 8,
                       "patch_size": 4},
    )  # fmt: skip
    model = transformers.AutoModelForImageTextToText.from_config(config)
    assert package.report_of(model).row("rms_norm").num_modules == 5
    bare = transformers.AutoModel.from_config(make("llama").config)
    assert plain_class(bare.norm) is type(bare.norm)


def test_undo_ends_it_and_the_report_reverts_a_model(saved, fresh_import):
    package = fresh_import(PACKAGE)
    model = AutoModelForCausalLM.from_pretrained(saved / "qwen2")
    package.undo()
    package.undo()
    plain = AutoModelForCausalLM.from_pretrained(saved / "qwen2")
    assert not is_patched(plain)
    assert is_patched(model)
    package.report_of(model).revert()
    assert not is_patched(model)
    ids = torch.arange(3, 12)[None]
    assert torch.equal(model(ids).logits, plain(ids).logits)
    with pytest.raises(PatchError, match="not patched while it was loaded"):
        package.report_of(plain)
    package.install()
    assert is_patched(AutoModelForCausalLM.from_pretrained(saved / "qwen2"))


def test_undo_refuses_under_another_wrapper(fresh_import, monkeypatch):
    package = fresh_import(PACKAGE)
    with monkeypatch.context() as patched:
        patched.setattr(PreTrainedModel, "from_pretrained", classmethod(lambda cls: None))
        with pytest.raises(PatchError, match="wrapped again"):
            package.undo()
