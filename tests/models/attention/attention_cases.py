"""Packed batches, and models that are given them."""

import torch
from families.family_models import FAMILIES, make
from transformers.masking_utils import causal_mask_function

from trainkit.models import attention
from trainkit.models.attention import pattern
from trainkit.models.leak_test import packed_inputs

PACKS = sorted(set(FAMILIES) - {"qwen2_vl"})
LENGTHS = ((7, 11, 3), (13, 5))
ROW = 24


def model_with(name, implementation=attention.NAME, **overrides):
    attention.register()
    model = make(name, **overrides)
    model.set_attn_implementation(implementation)
    if implementation == attention.NAME:
        attention.install(model)
    return model.eval()


def packed_batch(lengths=LENGTHS, row=ROW, seed=0):
    shape, generator = (len(lengths), row), torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 119, shape, generator=generator)
    return {"input_ids": ids, **packed_inputs(lengths, row)}


def documents(lengths=LENGTHS):
    for row, inside in enumerate(lengths):
        start = 0
        for length in inside:
            yield row, slice(start, start + length)
            start += length


def assert_documents_are_alone(model, plain, batch=None):
    batch = batch or packed_batch()
    packed = model(**batch).logits
    for row, part in documents():
        alone = plain(batch["input_ids"][row : row + 1, part]).logits[0]
        # fp32 logits of order one; the kernels sum in another order.
        torch.testing.assert_close(packed[row, part], alone, rtol=1e-4, atol=2e-5)


def pattern_of(bounds, function=causal_mask_function, **options):
    documents = pattern.Documents(bounds, 13)
    sizes = {"device": torch.device("cpu"), "documents": documents, **options}
    return pattern.Pattern(function, 2, ROW, **sizes)
