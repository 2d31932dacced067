"""Packed and padded training are the same training: same documents in, same losses out."""

import numpy as np
import pytest
import torch
from tiny import make_qwen2

from trainkit.data.collator import PackingCollator, PaddingCollator
from trainkit.models import attention
from trainkit.patching import patch

STEPS = 4
ROW = 48


def make_documents(step, count=6):
    random = np.random.default_rng(step)
    return [
        {
            "input_ids": random.integers(0, 255, length).astype(np.int32),
            "loss_mask": (random.random(length) < 0.6).astype(np.uint8),
            "source": 0,
        }
        for length in random.integers(3, 15, count)
    ]


def rows_of(documents):
    """Three documents a row; 3 * 14 tokens always fit."""
    return [documents[:3], documents[3:]]


def train(collate, implementation, *, kernels):
    attention.register()
    model = make_qwen2(256, tie_word_embeddings=True).train()
    model.config.use_cache = False
    model.set_attn_implementation(implementation)
    if implementation == attention.NAME:
        attention.install(model)
    if kernels:
        patch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        batch = collate(make_documents(step))
        num_items = int((batch["labels"][:, 1:] != -100).sum())
        loss = model(**batch, num_items_in_batch=num_items).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss.item(), num_items))
    return losses


@pytest.mark.parametrize("kernels", [False, True], ids=["plain", "kernels"])
def test_packed_training_repeats_padded_training(kernels):
    pad, pack = PaddingCollator(0), PackingCollator(ROW, 0)
    padded = train(pad, "eager", kernels=False)
    packed = train(lambda documents: pack(rows_of(documents)), attention.NAME, kernels=kernels)
    for (loss, count), (wanted, wanted_count) in zip(packed, padded, strict=True):
        assert count == wanted_count
        # fp32; Adam divides gradients by their size, so rounding of tiny ones grows a little.
        assert loss == pytest.approx(wanted, rel=2e-5)
    assert padded[0][0] - padded[-1][0] > 0.01  # it does train


def test_one_packed_row_or_many_make_no_difference():
    many, one = PackingCollator(ROW, 0), PackingCollator(2 * ROW, 0)
    first = train(lambda d: many(rows_of(d)), attention.NAME, kernels=True)
    second = train(lambda d: one([d]), attention.NAME, kernels=True)
    for (loss, _), (wanted, _) in zip(first, second, strict=True):
        assert loss == pytest.approx(wanted, rel=2e-5)
