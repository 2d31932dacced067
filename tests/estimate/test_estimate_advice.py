"""What is suggested fits when it is done, and the recipe takes it."""

import pytest

from trainkit.estimate.estimate import estimate
from trainkit.estimate.gpus import gpu_of
from trainkit.estimate.recipe import plan_of, replanning
from trainkit.recipe import load_recipe

RECIPE = """
model: {name_or_path: llama-3.1-8b}
data: {train: [train.jsonl], max_length: 16384}
kernels: true
training: {per_device_train_batch_size: 4}
"""

# A recorded step takes its time by the tiles: few tokens are as good as many.
_SMALL = [
    *("model.name_or_path=smollm2-1.7b", "data.max_length=2048"),
    "training.per_device_train_batch_size=32",
]
_ODD = ["training.per_device_train_batch_size=33", "data.max_length=2048"]
_LARGE = ["model.name_or_path=qwen2.5-14b", "data.max_length=2048"]


@pytest.mark.sample(
    *("*sequence*", "*tensor*", "*pipeline*a100*", "*zero3*"),
    *("*quantize=nf4'?-*", "*compile*", "*apollo*", "*budget*"),
)
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
        (_ODD, "h100", 8),
        (["lora.r=8", *_ODD], "h100", 1),
        (["training.optim=apollo_adamw", "data.max_length=128"], "3090", 1),
        (["model.fp8=true", "model.master_weights=false", *_SMALL], "3090", 8),
        (["lora.r=256", "lora.quantize=nf4", "recompute.budget_gib=70", *_LARGE], "4090", 8),
    ],
    ids=str,
)
def test_every_suggestion_is_taken_and_fits(tmp_path, words, gpu, gpus):
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    loaded = load_recipe(file, words)
    found = estimate(plan_of(loaded.recipe, gpus), gpu_of(gpu), replan=replanning(loaded, gpus))
    assert not found.fits
    assert found.suggestions
    for each in found.suggestions:
        changed = load_recipe(file, [*words, *each.settings.split()]).recipe
        again = estimate(plan_of(changed, gpus), gpu_of(gpu))
        assert again.fits, each
        assert again.peak.gib == pytest.approx(each.peak_gib)
        assert again.to_dict()["host_gib"] == pytest.approx(each.host_gib, abs=0.05)
        assert _rows(again) == _rows(found), "the step has other rows"
        slower = found.tokens_per_second / again.tokens_per_second
        assert slower == pytest.approx(each.time)


def test_all_weights_are_trained_in_little_memory_where_that_is_what_fits(tmp_path):
    """8-bit states without masters, each weight's step in the backward pass, as shipped for 24 GB;
    its states wait in pages of every rank, and so do layers' inputs."""
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    words = ["data.max_length=2048", "training.per_device_train_batch_size=2"]
    for gpus in (1, 4):
        loaded = load_recipe(file, words)
        plan = plan_of(loaded.recipe, gpus)
        found = estimate(plan, gpu_of("4090"), replan=replanning(loaded, gpus))
        bare = [each for each in found.suggestions if "optim_in_backward=true" in each.settings]
        pages = 2 * 8.03e9 * gpus / 2**30
        inputs = 29 * 2 * 4096 * plan.tokens * gpus / 2**30
        assert bare
        for each in bare:
            assert each.changes_result
            away = inputs if "offload" in each.settings else 0
            assert each.host_gib == pytest.approx(pages + away, rel=0.02)


def _rows(found):
    return found.plan.batch_size * found.plan.accumulation
