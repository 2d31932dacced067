"""Adapted tiny models for the adapters' tests."""

import torch

from trainkit.lora import LoraOptions, attach


def lively(model):
    """B away from zero, so that every gradient of an adapter is."""
    torch.manual_seed(3)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.normal_(std=0.1)
    return model


def adapt(model, **options):
    return lively(attach(model, LoraOptions(r=4, alpha=12, **options)))


def largest_difference(found, expected):
    assert found.keys() == expected.keys()
    return max(
        ((found[key] - expected[key]).norm() / expected[key].norm().clamp_min(1e-30)).item()
        for key in expected
    )
