"""Which kernel serves which device, and what it is called with."""

import functools
import itertools

import pictures
import pytest
import torch
from attention_cases import ROW, assert_documents_are_alone, model_with, packed_batch, pattern_of
from families.family_models import make
from transformers import AutoModelForImageTextToText

from trainkit.errors import ModelError
from trainkit.models import attention
from trainkit.models.attention import forward
from trainkit.models.vision import attend_in_tower
from trainkit.options.vision import VISION


def on_a_gpu(monkeypatch, capability, hip=None):
    monkeypatch.setattr(forward, "_capability", lambda index: capability)
    monkeypatch.setattr(forward, "_described", lambda index: f"GPU has {capability}")
    monkeypatch.setattr(torch.version, "hip", hip)
    forward.prefers_cudnn.cache_clear()
    return {"packed": True, "device": "cuda"}


def test_what_auto_means(monkeypatch):
    chosen = attention.resolve_attention(packed=True, device="cpu")
    assert (chosen.name, chosen.engine) == ("trainkit", "blocks")
    assert "cpu" in chosen.reason
    gpu = on_a_gpu(monkeypatch, (9, 0))
    assert attention.resolve_attention(**gpu).engine == "varlen"
    for change in ({"dtype": torch.float32}, {"head_size": 512}, {"head_size": 20}):
        assert attention.resolve_attention(**gpu, **change).engine == "flex"
    assert forward.prefers_cudnn(0)
    monkeypatch.setattr(forward, "varlen_attn", None)
    chosen = attention.resolve_attention(**gpu)
    assert chosen.engine == "flex"
    assert "no varlen attention" in chosen.reason


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)], ids=["V100", "T4"])
def test_old_gpus_get_blocks(monkeypatch, capability):
    chosen = attention.resolve_attention(**on_a_gpu(monkeypatch, capability))
    assert chosen.engine == "blocks"
    assert "compute capability 8.0" in chosen.reason


def test_an_mi300_is_no_hopper(monkeypatch):
    chosen = attention.resolve_attention(**on_a_gpu(monkeypatch, (9, 4), hip="6.4"))
    assert chosen.engine == "flex"
    assert not forward.prefers_cudnn(0)
    forward.prefers_cudnn.cache_clear()


def test_unknown_arguments_are_refused():
    states = torch.zeros(1, 2, 3, 4)
    run = functools.partial(forward.attention_forward, torch.nn.Module(), *[states] * 3, None)
    with pytest.raises(ModelError, match="`relative_bias`"):
        run(relative_bias=torch.zeros(1))
    run(relative_bias=None, sliding_window=3, cu_seq_lens_k=torch.zeros(1))
    with pytest.raises(ModelError, match="without a mask"):
        run(softcap=30.0)


# -- varlen attention, which needs a GPU, by its documented meaning -----------------------------


def varlen_as_documented(
    query, key, value, bounds, bounds_k, longest, longest_k, *,
    scale=None, window_size=(-1, -1), enable_gqa=False,
):  # fmt: skip
    """torch.nn.attention.varlen: token i of a document sees i - left to i + right.

    Of more keys than queries the last query's own is the last key.
    """
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert longest >= bounds.diff().max()
    assert longest_k >= bounds_k.diff().max()
    left, right = window_size
    output = torch.empty_like(query)
    spans = (itertools.pairwise(each.tolist()) for each in (bounds, bounds_k))
    for (start, stop), (first, last) in zip(*spans, strict=True):
        q = query[start:stop].transpose(0, 1)
        k, v = (x[first:last].transpose(0, 1) for x in (key, value))
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        tokens = torch.arange(last - first)  # both end together
        back = tokens[len(tokens) - (stop - start) :, None] - tokens
        seen = (back >= -right if right >= 0 else back == back) & (
            back <= left if left >= 0 else back == back
        )
        scores = (q @ k.transpose(1, 2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
        shares = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        output[start:stop] = (shares @ v).transpose(0, 1)
    return output


@pytest.fixture
def varlen_on_cpu(monkeypatch):
    monkeypatch.setattr(forward, "flash_obstacle", lambda *_: None)
    monkeypatch.setattr(forward, "varlen_attn", varlen_as_documented)
    forward._varlen_options.cache_clear()
    yield
    forward._varlen_options.cache_clear()


@pytest.mark.parametrize("window", [None, 1, 4, 13, 200])
def test_varlen_keeps_the_window(window, varlen_on_cpu):
    """A window off by one moves every document that is longer than it, and unpacked rows."""
    attention.register()
    model = make("mistral", sliding_window=window).eval()
    model.set_attn_implementation(attention.NAME)
    attention.install(model, "varlen")
    plain = model_with("mistral", "eager", sliding_window=window)
    assert_documents_are_alone(model, plain)
    ids = packed_batch()["input_ids"]
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-4, atol=2e-5)


def test_varlen_gets_grouped_heads_as_they_are(varlen_on_cpu, monkeypatch):
    seen = {}

    def varlen(q, k, v, *bounds, scale=None, window_size=(-1, -1), enable_gqa=False):
        seen.update(q=q, k=k, scale=scale)
        return varlen_as_documented(
            q, k, v, *bounds, scale=scale, window_size=window_size, enable_gqa=enable_gqa
        )

    monkeypatch.setattr(forward, "varlen_attn", varlen)
    query = torch.randn(2, ROW, 4, 16).transpose(1, 2)
    key = torch.randn(2, ROW, 2, 16).transpose(1, 2)
    found = pattern_of(packed_batch()["cu_seq_lens_q"], engine="varlen")
    output, weights = forward.attention_forward(
        torch.nn.Module(), query, key, key, found, scaling=0.25
    )
    assert output.shape == (2, ROW, 4, 16)
    assert weights is None
    assert seen["q"].data_ptr() == query.data_ptr()
    assert seen["k"].shape == (2 * ROW, 2, 16)
    assert seen["scale"] == 0.25


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3"])
def test_images_of_a_tower_are_attended_to_in_one_call(name, varlen_on_cpu, tmp_path, monkeypatch):
    """Each to itself alone, ahead and back; where transformers gives no bounds, as it does it."""
    calls = []

    @functools.wraps(varlen_as_documented)
    def varlen(*given, **options):
        calls.append(options["window_size"])
        return varlen_as_documented(*given, **options)

    attention.register()
    monkeypatch.setattr(forward, "varlen_attn", varlen)
    directory = pictures.make_model_directory(name, tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    tower = model.base_model.get_submodule(VISION[name].tower)
    given = {"pixel_values": torch.rand(2, 3, 16, 16)}
    if name != "gemma3":
        grid = torch.tensor([[1, 4, 6], [1, 8, 2], [1, 2, 2]])
        pixels = torch.rand(int(grid.prod(1).sum()), 96)
        given = {"pixel_values": pixels, "image_grid_thw": grid}
    found = []
    for by_bounds in (False, True):
        attend_in_tower(tower, by_bounds=by_bounds)
        assert bool(calls) is False
        with torch.no_grad():
            seen = model.base_model.get_image_features(**given).pooler_output
        found.append(seen if isinstance(seen, torch.Tensor) else torch.cat(seen))
    assert calls == ([(-1, -1)] * 2 if name != "gemma3" else [])
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)
    monkeypatch.undo()  # no such kernel: image by image, to the bit what SDPA gives
    with torch.no_grad():
        seen = model.base_model.get_image_features(**given).pooler_output
    assert torch.equal(found[0], seen if isinstance(seen, torch.Tensor) else torch.cat(seen))
