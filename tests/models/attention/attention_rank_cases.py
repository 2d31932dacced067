"""The proof at start under ZeRO-3, where no rank holds a whole weight."""

from dataclasses import asdict

import torch
from transformers.integrations import HfDeepSpeedConfig

from trainkit.models.attention import forward, proof, resolve_attention
from trainkit.models.loading import load_model
from trainkit.options import ModelOptions
from trainkit.parallel.parameters import is_whole


def prove(directory, dtype, without=None, packed=False):
    """What the proof says of a model that was loaded in pieces; ``without``: an option dropped."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    kept = HfDeepSpeedConfig(
        {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        }
    )
    model = load_model(ModelOptions(directory, dtype=dtype), attention="eager")
    original = forward.spelled_out
    if without is not None:
        forward.spelled_out = lambda *a, **k: original(*a, **{**k, without: None})
    state = torch.random.get_rng_state()
    try:
        wanted = resolve_attention(packed=packed, device="cpu", dtype=model.dtype)
        found = proof.settle(model, wanted, packed=packed, is_auto=True)
    finally:
        forward.spelled_out = original
    assert kept is not None
    return {
        "is_whole": any(is_whole(parameter) for parameter in model.parameters()),
        "attention": model.config._attn_implementation,
        "same_randomness": torch.equal(state, torch.random.get_rng_state()),
        **asdict(found),
    }
