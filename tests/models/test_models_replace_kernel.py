"""`import trainkit.replace_kernel` patches what is loaded afterwards, until it is undone."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from families.family_models import make
from transformers import AutoModelForCausalLM, PreTrainedModel

import trainkit
from trainkit.errors import PatchError
from trainkit.models.families import FAMILIES
from trainkit.models.swap import is_swapped

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
    return is_swapped(model.get_decoder().norm)


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
    assert package.report_of(model).family.name == "llama"


def test_a_family_module_patches_that_family_only(saved, fresh_import):
    fresh_import(f"{PACKAGE}.qwen2")
    assert is_patched(AutoModelForCausalLM.from_pretrained(saved / "qwen2"))
    assert not is_patched(AutoModelForCausalLM.from_pretrained(saved / "llama"))
    fresh_import(f"{PACKAGE}.phi3")
    assert is_patched(AutoModelForCausalLM.from_pretrained(saved / "phi3"))
    assert not is_patched(AutoModelForCausalLM.from_pretrained(saved / "llama"))


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


def test_every_row_has_its_module():
    """`import trainkit.replace_kernel.<row>` is part of adding a family."""
    folder = Path(trainkit.__file__).parent / "replace_kernel"
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__", "loading"}
    assert modules == FAMILIES.keys()
    for name in modules:
        assert f'install("{name}")' in (folder / f"{name}.py").read_text()
