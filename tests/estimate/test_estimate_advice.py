"""What is suggested fits when it is done, and the recipe takes it."""

import pytest

from trainkit.estimate.estimate import estimate
from trainkit.estimate.gpus import gpu_of
from trainkit.estimate.recipe import allowing, plan_of
from trainkit.recipe import load_recipe

RECIPE = """
model: {name_or_path: llama-3.1-8b}
data: {train: [train.jsonl], max_length: 16384}
kernels: true
training: {per_device_train_batch_size: 4}
"""


@pytest.mark.parametrize(
    ("words", "gpu", "gpus"),
    [
        ([], "4090", 1),
        (["recompute=none"], "h100", 1),
        (["recompute=full"], "h100", 1),
        (["global_batch_size=64"], "h100", 8),
        (["training.optim=muon"], "h100", 2),
        (["training.optim=flat_adamw"], "h200", 2),
        (["training.optim=adafactor"], "h100", 1),
        (["model.master_weights=false"], "h100", 1),
        (["parallel.sequence=2"], "h100", 4),
        (["parallel.tensor=2", "parallel.shard=zero1"], "h100", 8),
        (["parallel.pipeline=2"], "h100", 4),
        (["parallel.pipeline=2", "lora.r=8"], "a100-40g", 2),
        (["parallel.shard=fsdp2"], "h100", 4),
        (["parallel.shard=zero3"], "4090", 8),
        (["lora.r=16", "recompute.every=2"], "4090", 1),
        (["lora.r=16", "lora.quantize=nf4"], "4090", 2),
        (["lora.r=16", "lora.modules_to_save=[lm_head]"], "h100", 1),
        (["model.fp8=true"], "h200", 1),
        (["training.torch_compile=true"], "h100", 1),
        (["kernels=false"], "h200", 1),
        (["model.mlp_chunk_tokens=4096"], "h200", 1),
        (["data.packing=true"], "a100-80g", 2),
    ],
    ids=str,
)
def test_every_suggestion_is_taken_and_fits(tmp_path, words, gpu, gpus):
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    loaded = load_recipe(file, words)
    found = estimate(plan_of(loaded.recipe, gpus), gpu_of(gpu), allows=allowing(loaded, gpus))
    assert not found.fits
    assert found.suggestions
    for each in found.suggestions:
        changed = load_recipe(file, [*words, *each.settings.split()]).recipe
        again = estimate(plan_of(changed, gpus), gpu_of(gpu))
        assert again.fits, each
        assert again.peak.gib == pytest.approx(each.peak_gib, rel=0.01)
