"""The leak test notices documents that see one another."""

import pytest
import torch
from attention_cases import model_with

from trainkit.errors import TrainkitError
from trainkit.models import attention
from trainkit.models.attention import choice, pattern
from trainkit.models.checks.leak_test import leak_test


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

    def shifted(bounds, longest):
        return documents(torch.cat((bounds[:1], bounds[1:2] + 1, bounds[2:])), longest)

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


# -- refusals and choices -----------------------------------------------------------------------
