"""Every value of init_lora_weights: trained, saved, and loaded by peft over the plain base."""

import re
import typing

import pytest
import torch
from peft import LoraConfig, PeftModel
from test_lora_adapter import make_model, train_a_little

from trainkit.checkpoint.weights.adapter import read_adapter
from trainkit.errors import RecipeError
from trainkit.lora import LoraOptions, attach
from trainkit.options.model import (
    INITIALISATIONS,
    NOT_TAKEN,
    REFUSED_INITIALISATIONS,
    why_not_initialisation,
)

TAKEN = (True, False, *(name.replace("_N", "_4") for name in INITIALISATIONS))
VARIANTS = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "16-bit adapters": {"adapter_dtype": "model"},
}


def peft_values():
    """What peft's own annotation of the field lists."""
    hint = typing.get_type_hints(LoraConfig)["init_lora_weights"]
    literal = next(part for part in typing.get_args(hint) if typing.get_args(part))
    return {name.replace("[number of iters]", "N") for name in typing.get_args(literal)}


def test_every_value_that_peft_knows_is_taken_or_refused_by_name():
    known = set(INITIALISATIONS) | REFUSED_INITIALISATIONS.keys()
    assert peft_values() <= known
    assert all(why_not_initialisation(value) is None for value in TAKEN)
    for name, reason in REFUSED_INITIALISATIONS.items():
        assert reason in why_not_initialisation(name)
    assert "not known" in why_not_initialisation("gausian")


def test_every_field_that_peft_knows_is_a_key_or_refused_by_name():
    import dataclasses

    renamed = {"lora_alpha": "alpha", "lora_dropout": "dropout"}
    fields = {renamed.get(f.name, f.name) for f in dataclasses.fields(LoraConfig)}
    assert fields - LoraOptions.model_fields.keys() == set(NOT_TAKEN) & fields
    assert not NOT_TAKEN.keys() & LoraOptions.model_fields.keys()


def logits(model, ids):
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits.float()


@pytest.mark.sample("*-plain-*32", "pissa-*", "True-16*", "olora-dora-*", "gaussian-rslora-*")
@pytest.mark.parametrize(
    ("variant", "dtype"),
    [*((name, torch.float32) for name in VARIANTS), ("plain", torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("init", TAKEN, ids=str)
def test_a_saved_adapter_fits_the_plain_base(init, variant, dtype, tmp_path):
    if variant == "dora" and init == "mica":
        pytest.skip("peft has no such pair; it is refused below")
    options = LoraOptions(r=4, init_lora_weights=init, **VARIANTS[variant])
    model = attach(make_model(dtype=dtype), options)
    ids, losses = train_a_little(model, steps=4)
    assert losses[-1] < losses[0]
    trained = logits(model, ids)
    model.save_pretrained(tmp_path / "adapter")
    again = logits(PeftModel.from_pretrained(make_model(dtype=dtype), tmp_path / "adapter"), ids)
    # In fp32 only the order of sums differs. In bf16 the reduced base was rounded once more, half
    # a unit of 2^-8 in each weight, and each of a dozen activations as well.
    limit = 1e-4 if dtype is torch.float32 else 12 * 2**-8
    assert (again - trained).norm() <= limit * trained.norm()
    # merge reads the same file by itself
    adapter = read_adapter(tmp_path / "adapter")
    base = make_model()
    for name, module in adapter.modules.items():
        weight = base.get_submodule(name).weight
        weight.data = module.merged(weight.data)
    if dtype is torch.float32:
        assert (logits(base, ids) - trained).norm() <= limit * trained.norm()


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora"])
def test_training_goes_on_from_a_saved_adapter(init, tmp_path):
    options = LoraOptions(r=4, init_lora_weights=init)
    torch.manual_seed(0)
    model = attach(make_model(), options)
    ids, _ = train_a_little(model)
    model.save_pretrained(tmp_path / "checkpoint")
    torch.manual_seed(0)
    again = attach(make_model(), options)
    again.load_adapter(tmp_path / "checkpoint", "default", is_trainable=True)
    assert torch.equal(logits(model, ids), logits(again, ids))
    saved = dict(model.named_parameters())
    assert all(torch.equal(saved[name], p) for name, p in again.named_parameters())
    assert {n for n, p in again.named_parameters() if p.requires_grad} == {
        n for n, p in saved.items() if p.requires_grad
    }


def test_another_device_s_factors_give_way_to_the_run_s_own(tmp_path, caplog):
    """A random projection drawn again stands for the other signs that another SVD may find."""
    options = LoraOptions(r=4, init_lora_weights="pissa_niter_1")
    torch.manual_seed(0)
    model = attach(make_model(), options)
    ids, _ = train_a_little(model)
    model.save_pretrained(tmp_path / "checkpoint")
    plain = make_model()
    torch.manual_seed(7)
    again = attach(plain, options)
    again.load_adapter(tmp_path / "checkpoint", "default")
    torch.testing.assert_close(logits(again, ids), logits(model, ids), rtol=1e-4, atol=1e-5)
    assert "taken apart otherwise" in caplog.text
    again.save_pretrained(tmp_path / "second")
    first, second = (read_adapter(tmp_path / name) for name in ("checkpoint", "second"))
    assert all(torch.equal(m.down, second.modules[n].down) for n, m in first.modules.items())


@pytest.mark.parametrize(
    "options",
    [
        {"init_lora_weights": "pissa", "target_modules": ("embed_tokens",)},
        {"init_lora_weights": "olora", "r": 33},
        {"init_lora_weights": "mica", "use_dora": True},
        {"init_lora_weights": "orthogonal", "r": 3},
        {"init_lora_weights": "gaussian", "lora_bias": True},
        {"init_lora_weights": "eva"},
        {"init_lora_weights": "loftq"},
    ],
    ids=str,
)
def test_what_does_not_go_together_is_the_recipe_s_error(options):
    with pytest.raises(RecipeError, match=re.compile("lora")):
        attach(make_model(), LoraOptions(**{"r": 4, **options}))
