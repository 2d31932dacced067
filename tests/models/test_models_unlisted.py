"""Types that no list has ever named: loaded with kernels, checkpointed, and with every loss."""

import pytest
import torch
from families.survey import batch, build, distance, step
from torch.nn.functional import cross_entropy

from trainkit.models.loss import LossOptions, configure, take_counts
from trainkit.models.patch import patch_kernels

TEN = [
    "gemma3_text", "smollm3", "granite", "cohere2", "olmo2", "helium", "exaone4", "qwen3_moe",
    "ernie4_5", "hunyuan_v1_dense",
]  # fmt: skip


@pytest.mark.parametrize("model_type", TEN)
def test_checkpointed_layers_give_the_plain_models_gradients(model_type):
    model = build(model_type).train()
    plain = step(model)
    patch_kernels(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert distance(step(model), plain) < 1e-4


@pytest.mark.parametrize("model_type", ["smollm3", "granite", "cohere2", "gpt_neox", "qwen3_moe"])
def test_replace_kernel_patches_them_as_they_are_made(model_type):
    from trainkit.replace_kernel import install, report_of, undo

    plain = build(model_type)
    install()
    try:
        model = type(plain)._from_config(plain.config)
    finally:
        undo()
    report = report_of(model)
    assert report.row("linear_cross_entropy").status == "on"
    assert report.own.num > 0
    assert not report.own.refused


@pytest.mark.parametrize("model_type", ["gemma2", "cohere", "granite"])
def test_smoothing_z_loss_and_counts_under_caps_and_scales(model_type):
    model = build(model_type)
    ids, labels = batch()["input_ids"], batch()["labels"]
    with torch.no_grad():
        rows = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
    targets = labels[:, 1:].flatten()
    trained = targets >= 0
    wanted = cross_entropy(rows, targets, label_smoothing=0.1)
    wanted = wanted + 1e-2 * rows.logsumexp(-1)[trained].square().mean()
    assert patch_kernels(model).row("linear_cross_entropy").status == "on"
    assert configure(model, LossOptions(label_smoothing=0.1, z_loss=1e-2)) == 1
    torch.testing.assert_close(model(**batch()).loss, wanted, rtol=1e-5, atol=0)
    correct = (rows.argmax(-1) == targets)[trained].sum().item()
    assert take_counts(model.modules(), training=False).tolist() == [correct, trained.sum().item()]
