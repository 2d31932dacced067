"""The loss that comes out of the head equals the one that Hugging Face computes from logits."""

import inspect
import logging

import pytest
import torch
from tiny import make_qwen2
from torch import nn

from trainkit.models import loss as loss_head
from trainkit.patching import patch

ONLY_THE_LOSS = {
    "rms_norm": False,
    "add_rms_norm": False,
    "rope": False,
    "swiglu": False,
    "linear_cross_entropy": True,
}


def make_batch(seed=0, *, batch=3, length=11, vocab=64):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (batch, length), generator=generator)
    labels = ids.where(torch.rand(ids.shape, generator=generator) < 0.5, -100)
    return {"input_ids": ids, "labels": labels}


def gradients(model, batch):
    model.zero_grad()
    output = model(**batch)
    output.loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return output.loss.detach(), found


def assert_same(model, batch, plain):
    loss, found = gradients(model, batch)
    wanted_loss, wanted = gradients(plain, batch)
    # fp32 on both sides; sums over at most 33 rows in another order.
    torch.testing.assert_close(loss, wanted_loss, rtol=1e-5, atol=1e-6)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=2e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"num_items_in_batch": 9},
        {"num_items_in_batch": torch.tensor(9), "num_trained_tokens": 30},
        {"shift_labels": torch.randint(0, 64, (3, 11), generator=torch.Generator().manual_seed(5))},
    ],
    ids=["mean", "num_items", "tensor", "shift_labels"],
)
def test_loss_and_gradients_equal_hugging_face(tie, extra):
    model, plain = (make_qwen2(64, tie_word_embeddings=tie) for _ in range(2))
    report = patch(model, ONLY_THE_LOSS)
    assert report.row("linear_cross_entropy").status == "on"
    assert_same(model, {**make_batch(), **extra}, plain)
    output = model(**make_batch())
    assert output.logits is None


def test_another_ignore_index_is_obeyed():
    model, plain = (make_qwen2(64) for _ in range(2))
    patch(model, ONLY_THE_LOSS)
    batch = make_batch()
    batch["labels"] = batch["labels"].masked_fill(batch["labels"] == -100, 3)
    assert_same(model, {**batch, "ignore_index": 3}, plain)


def test_positional_arguments_mean_what_they_meant():
    model, plain = make_qwen2(64), make_qwen2(64)
    patch(model, ONLY_THE_LOSS)
    batch = make_batch()
    ids, labels = batch["input_ids"], batch["labels"]
    mask = torch.ones_like(ids)
    mask[:, 9:] = 0
    ours = model(ids, mask, None, None, None, labels).loss
    torch.testing.assert_close(ours, plain(ids, mask, None, None, None, labels).loss)


def test_without_labels_the_model_is_the_old_one_bit_for_bit():
    model, plain = make_qwen2(64).eval(), make_qwen2(64).eval()
    patch(model, ONLY_THE_LOSS)
    ids = make_batch()["input_ids"]
    assert torch.equal(model(ids).logits, plain(ids).logits)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)


def _lora_on_head(model):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))


def _wrapped_head(model):
    model.lm_head = nn.Sequential(model.lm_head)
    return model


def _own_loss(model):
    model.loss_function = lambda logits, labels, **_: logits.float().square().mean()
    return model


@pytest.mark.parametrize(
    ("change", "reason"),
    [(_lora_on_head, "lm_head has become a Linear"), (_own_loss, "its own loss function")],
)
def test_what_needs_logits_after_the_patch_gets_them_with_a_reason(change, reason, caplog):
    loss_head._log_once.cache_clear()
    model, plain = (
        make_qwen2(64, tie_word_embeddings=False),
        make_qwen2(64, tie_word_embeddings=False),
    )
    patch(model, ONLY_THE_LOSS)
    torch.manual_seed(1)
    model = change(model)
    torch.manual_seed(1)
    plain = change(plain)
    with caplog.at_level(logging.INFO, logger="trainkit"):
        output = model(**make_batch())
    assert output.logits is not None
    torch.testing.assert_close(output.loss, plain(**make_batch()).loss)
    assert reason in caplog.text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_lora_on_head, "not a plain Linear"),
        (_own_loss, "its own loss function"),
        (_wrapped_head, "Sequential"),
    ],
)
def test_what_needs_logits_before_the_patch_is_reported(change, reason):
    model = change(make_qwen2(64, tie_word_embeddings=False))
    row = patch(model).row("linear_cross_entropy")
    assert row.status == "off"
    assert reason in row.reason


@pytest.mark.parametrize(
    ("extra", "reason"),
    [({"logits_to_keep": torch.arange(11)}, "logits_to_keep"), ({"return_dict": False}, "tuple")],
)
def test_calls_that_ask_for_logits_get_them(extra, reason, caplog):
    loss_head._log_once.cache_clear()
    model, plain = make_qwen2(64), make_qwen2(64)
    patch(model, ONLY_THE_LOSS)
    with caplog.at_level(logging.INFO, logger="trainkit"):
        output = model(**make_batch(), **extra)
    wanted = plain(**make_batch(), **extra)
    for got, expected in zip(output[:2], wanted[:2], strict=True):
        torch.testing.assert_close(got, expected)
    assert reason in caplog.text


def test_token_accuracy_is_counted_apart_for_training_and_evaluation():
    model, plain = make_qwen2(64), make_qwen2(64)
    patch(model, ONLY_THE_LOSS)
    assert loss_head.take_counts(model.modules()) is None
    batches = [make_batch(seed) for seed in range(2)]
    wanted = torch.zeros(2, dtype=torch.int64)
    for batch in batches:
        logits = plain(batch["input_ids"]).logits[:, :-1]
        labels = batch["labels"][:, 1:] = logits.argmax(-1).where(
            batch["labels"][:, 1:] % 2 == 0, batch["labels"][:, 1:]
        )
        hits = (logits.argmax(-1) == labels) & (labels != -100)
        wanted += torch.stack((hits.sum(), (labels != -100).sum()))
        model.train()(**batch)
    model.eval()(**batches[0])
    assert wanted[0] > 0
    assert torch.equal(loss_head.take_counts(model.modules()), wanted)
    assert loss_head.take_counts(model.modules()) is None
    assert loss_head.take_counts(model.modules(), training=False) is not None


def test_options_reach_the_loss():
    model, plain = make_qwen2(64), make_qwen2(64)
    patch(model, ONLY_THE_LOSS)
    batch = make_batch()
    assert (
        loss_head.configure(model, loss_head.LossOptions(label_smoothing=0.1, chunk_tokens=4)) == 1
    )
    logits = plain(batch["input_ids"]).logits[:, :-1].flatten(0, 1)
    wanted = nn.functional.cross_entropy(
        logits, batch["labels"][:, 1:].flatten(), label_smoothing=0.1
    )
    torch.testing.assert_close(model(**batch).loss, wanted)


def test_nothing_trained_is_zero_where_hugging_face_has_nan():
    model = make_qwen2(64)
    patch(model, ONLY_THE_LOSS)
    batch = make_batch()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    loss, found = gradients(model, batch)
    assert loss == 0
    assert len(found) == len(list(model.parameters()))
    assert not any(gradient.any() for gradient in found.values())
