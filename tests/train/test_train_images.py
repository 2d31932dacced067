"""Rows with images: packed as alone, as plain transformers trains them, tower included."""

import pytest
import torch
from pictures import KINDS, QWEN3_5, Family

from trainkit.models.swap import plain_class
from trainkit.options.vision import VISION

seen = pytest.mark.sample("qwen2_5_vl", "idefics3", "gemma[34]")


@pytest.fixture(scope="module", params=KINDS)
def family(request, tmp_path_factory):
    return Family(request.param, tmp_path_factory.mktemp(request.param))


def summed(model, batch):
    """The sum of the losses of the trained tokens."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
    )


def gradients(model, batches):
    model.zero_grad()
    total = 0.0
    for batch in batches:
        loss = summed(model, batch)
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found, expected, within=3e-6):
    (loss, mine), (truth, theirs) = found, expected
    assert loss == pytest.approx(truth, rel=1e-6)
    assert mine.keys() == theirs.keys()
    towers = [name for name in mine if "vis" in name or "projector" in name or "connector" in name]
    assert towers
    for part in (towers, [name for name in mine if name not in towers]):
        largest = max(theirs[name].abs().max() for name in part)
        worst = max((mine[name] - theirs[name]).abs().max() for name in part)
        assert worst <= within * largest, (part[0], float(worst / largest))


@seen
def test_packed_rows_train_as_each_sample_in_plain_transformers(family):
    """Loss and every gradient: attention, positions, placeholders and pixels are the model's."""
    samples = [family.data[index] for index in range(12)]
    plain = family.plain().train()
    expected = gradients(plain, [family.plain_batch(sample) for sample in samples])
    packed = family.collator(True)([samples[:6], samples[6:]])
    # Kernels keep Qwen3.5's documents apart; plain fp32 is 3e-5 off fp64 in such a layer.
    within = 1e-5 if family.vision.config.model_type in QWEN3_5 else 3e-6
    assert_same(gradients(family.build(), [packed]), expected, within)


@seen
def test_kernels_go_into_towers_that_take_images_of_every_size(family):
    samples, kind = [family.data[index] for index in range(6)], family.vision.config.model_type
    packed = family.collator(True)([samples])
    model = family.build(kernels=True)
    assert_same(gradients(model, [packed]), gradients(family.build(), [packed]))
    tower = model.base_model.get_submodule(VISION[kind].tower)
    swapped = {
        type(module).__name__
        for module in tower.modules()
        if plain_class(module) is not type(module)
    }
    layers = [name for name in swapped if name.endswith(("Block", "Layer"))]
    assert bool(layers) == bool(swapped) == (KINDS[kind] in ("patches", "rows", "pooled")), swapped
    turns = {name for name in swapped if name.endswith("Attention")}
    assert bool(turns) == ("Conv3d" in swapped) == (KINDS[kind] == "patches"), swapped


@seen
def test_a_changed_image_is_seen_by_its_own_sample_alone(family):
    """The other logits stay to the bit; without documents between them they would not."""
    from trainkit.errors import TrainkitError
    from trainkit.models.leak_test import image_leak_test

    samples = [family.data[index] for index in range(4)]
    batch = family.collator(True)([samples])
    model = family.build()
    assert image_leak_test(model, batch, token_id=family.vision.token_id, attention="auto") > 0.0
    ends = batch["cu_seq_lens_q"]
    whole = {name: ends[[0, -1]] for name in ("cu_seq_lens_q", "cu_seq_lens_k")}
    longest = {name: int(ends[-1]) for name in ("max_length_q", "max_length_k")}

    class Leaky(torch.nn.Module):
        config = model.config

        def forward(self, **given):
            return model(**{**given, **whole, **longest})

    with pytest.raises(TrainkitError, match="packed documents leak"):
        image_leak_test(Leaky(), batch, token_id=family.vision.token_id, attention="auto")


@seen
def test_samples_alone_train_as_in_plain_transformers(family):
    samples = [family.data[index] for index in range(12)]
    expected = gradients(family.plain().train(), [family.plain_batch(each) for each in samples])
    padded = [family.collator(False)(samples[:5]), family.collator(False)(samples[5:])]
    assert_same(gradients(family.build(packing=False), padded), expected)


@seen
def test_a_batch_without_images_calls_what_sees_and_learns_nothing_from_it(family):
    batch = family.collator(False)([next(one for one in family.data if not one.get("images"))])
    model = family.build(packing=False)
    loss, expected = gradients(model, [batch])
    model.base_model.sight.is_everywhere = True
    seen, found = gradients(model, [batch])
    assert seen == loss
    assert any("vis" in name for name in found.keys() - expected.keys())
    for name, gradient in found.items():
        assert torch.equal(gradient, expected.get(name, torch.zeros_like(gradient))), name
