"""The leak test notices documents that see one another."""

import pytest
import tiny_classes
import torch
from attention_cases import model_with

from trainkit.errors import TrainkitError
from trainkit.models import attention
from trainkit.models.attention import choice, pattern
from trainkit.models.leak_test import leak_test


def test_the_leak_test_sees_broken_isolation(monkeypatch):
    model = model_with("qwen2")
    whole = property(lambda self: [(slice(None), 0, self.length)])
    monkeypatch.setattr(pattern.Pattern, "spans", whole)
    with pytest.raises(TrainkitError, match="document 0 moved the logits of document 1") as failure:
        leak_test(model, attention="broken", vocab_size=128)
    assert "attention broken" in str(failure.value)


def test_the_leak_test_sees_a_single_shifted_bound(monkeypatch):
    model = model_with("qwen2")
    documents = choice.Documents

    def shifted(bounds, longest, shared):
        moved = torch.cat((bounds[:1], bounds[1:2] + 1, bounds[2:]))
        return documents(moved, longest, shared)

    monkeypatch.setattr(choice, "Documents", shifted)
    with pytest.raises(TrainkitError, match="leak"):
        leak_test(model, attention="shifted", vocab_size=128)


def test_the_leak_test_sees_a_model_that_ignores_its_input():
    model = model_with("qwen2")
    with torch.no_grad():
        model.model.norm.weight.zero_()
    with pytest.raises(TrainkitError, match="saw no change"):
        leak_test(model, attention="deaf", vocab_size=128)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_hugging_faces_own_masks_pass_too(implementation):
    assert leak_test(model_with("qwen2", implementation), attention="hf", vocab_size=128) > 0


def test_the_leak_test_leaves_the_mode_alone():
    model = model_with("qwen2").train()
    leak_test(model, attention=attention.NAME, vocab_size=128)
    assert model.training


def test_experts_may_round_as_the_plain_model_does(monkeypatch):
    """The rows that an expert takes depend on the other documents, and so does the last bit."""
    config_class, model_class = tiny_classes.classes()["ernie4_5_moe"]
    model = tiny_classes.make_tiny(config_class, model_class)
    model.set_attn_implementation(attention.NAME)
    own_forward = type(model).forward

    def rounded(self, input_ids, **kwargs):
        """As some CPUs round: a bit that depends on what else is in the batch."""
        output = own_forward(self, input_ids, **kwargs)
        output.logits *= 1 + 2**-23 * (int(input_ids.sum()) % 3)
        return output

    monkeypatch.setattr(type(model), "forward", rounded)
    for seed in range(2):
        leak_test(model, attention=attention.NAME, vocab_size=100, seed=seed)

    def leaking(self, input_ids, **kwargs):
        """A leak of a thousandth of the effect is far above what rounding explains."""
        output = rounded(self, input_ids, **kwargs)
        output.logits += 1e-4 * input_ids.float().cumsum(1)[..., None]
        return output

    monkeypatch.setattr(type(model), "forward", leaking)
    with pytest.raises(TrainkitError, match="rounding would explain"):
        leak_test(model, attention=attention.NAME, vocab_size=100)


# -- refusals and choices -----------------------------------------------------------------------
