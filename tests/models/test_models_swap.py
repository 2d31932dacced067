"""Swapped classes: both engines' swaps in one call, undone together, pickled and copied."""

import copy
import pickle

import pytest
import torch
from families.family_models import DEVICE, make, make_batch
from lora.lora_models import adapt
from ranks import run_ranks

import trainkit
from trainkit.errors import PatchError
from trainkit.lora import fuse
from trainkit.models.patch import patch_kernels
from trainkit.models.swap import plain_class
from trainkit.options.model import LORA_OPS


def classes(model):
    return [type(module) for module in model.modules()]


def loss_of(model, name):
    model.eval()  # no dropout; with gradients, so that the kernels run
    batch = {key: value.to(DEVICE) for key, value in make_batch(name).items()}
    return model(**batch).loss.detach()


def test_one_call_fuses_the_adapters_of_a_peft_model_and_reverts_both():
    model = adapt(make("qwen2"))
    before = classes(model)
    report = trainkit.patch(model)
    assert [row.op for row in report.rows][-4:] == list(LORA_OPS)
    assert report.row("lora_mlp").num_modules == 2
    assert "lora_qkv" in str(report)
    assert report.row("rms_norm").status == "on"
    report.revert()
    assert classes(model) == before
    assert not report.active


def test_adapter_ops_have_switches():
    report = trainkit.patch(adapt(make("qwen2")), {"lora_mlp": False})
    assert report.row("lora_mlp").reason == "switched off"
    assert report.row("lora_linear").status == "on"
    with pytest.raises(PatchError, match="did you mean 'lora_mlp'"):
        trainkit.patch(make("qwen2"), {"lora_mpl": True})


def test_an_adapter_op_named_and_impossible_is_refused_and_nothing_is_left_swapped():
    model = adapt(make("glm"))  # q, k and v are one layer there
    before = classes(model)
    with pytest.raises(PatchError, match="lora_qkv cannot be switched on"):
        trainkit.patch(model, {"lora_qkv": True, "rope": False})
    assert classes(model) == before


@pytest.mark.parametrize("later", ["on the kernels", "on the adapters"])
def test_reverting_refuses_what_lies_on_top(later):
    model = adapt(make("qwen2"))
    kernels = patch_kernels(model)
    report = kernels
    if later == "on the adapters":
        report = fuse(model)
        mlp = model.get_base_model().model.layers[0].mlp
        mlp.__class__ = type("Later", (type(mlp),), {})
    else:
        fuse(model)
    before = classes(model)
    with pytest.raises(PatchError, match="swapped on top"):
        report.revert()
    assert classes(model) == before


@pytest.mark.parametrize("how", ["copied", "pickled"])
@pytest.mark.parametrize("adapted", [False, True], ids=["bare", "peft"])
def test_a_patched_model_can_be_copied_and_pickled(how, adapted):
    model = make("qwen2")
    model = adapt(model) if adapted else model
    trainkit.patch(model)
    again = copy.deepcopy(model) if how == "copied" else pickle.loads(pickle.dumps(model))
    assert classes(again) == classes(model)
    assert torch.equal(loss_of(again, "qwen2"), loss_of(model, "qwen2"))
    assert not {id(each) for each in model.parameters()} & {id(each) for each in again.parameters()}


def test_a_pickled_model_comes_back_patched_in_another_process(tmp_path):
    model = make("qwen2", device="cpu")
    trainkit.patch(model)
    path = tmp_path / "model.pickle"
    path.write_bytes(pickle.dumps(model))
    (said,) = run_ranks("models.swap_cases:unpickled", world_size=1, path=str(path))
    number = sum(plain_class(each) is not type(each) for each in model.modules())
    module = "transformers.models.qwen2.modeling_qwen2"
    assert said == [[], "Qwen2ForCausalLM", module, number]
