"""Fused adapters on two ranks: DDP and ZeRO equal one process that runs peft's own path."""

import pytest
from families.family_models import make
from ranks import run_ranks

# fp32: three steps of rate 0.1, gradients of order 1 with a relative error of 1e-6 to 1e-5.
TOLERANCE = 5e-6


@pytest.mark.sample("qwen2-0", "phi3-3")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["qwen2", "glm", "phi3", "gemma"])
def test_two_ranks_equal_one_process(name, stage):
    for difference in run_ranks("lora.lora_rank_cases:train", name=name, stage=stage):
        assert difference < TOLERANCE


@pytest.mark.sample("reentrant-3", "non_reentrant-2")
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("checkpointing", ["reentrant", "non_reentrant"])
def test_with_checkpointing(stage, checkpointing):
    results = run_ranks(
        "lora.lora_rank_cases:train", name="qwen2", stage=stage, checkpointing=checkpointing
    )
    for difference in results:
        assert difference < TOLERANCE


@pytest.mark.sample("nf4-True", "fp8-*")
@pytest.mark.parametrize(("quantize", "head"), [("nf4", False), ("nf4", True), ("fp8", False)])
def test_packed_weights_under_zero(quantize, head, tmp_path):
    make("qwen2").save_pretrained(tmp_path)
    options = {"folder": str(tmp_path), "quantize": quantize, "head": head}
    results = {
        stage: run_ranks("lora.lora_rank_cases:quantized", stage=stage, **options)
        for stage in (2, 3)
    }
    for rank in range(2):
        two, three = results[2][rank], results[3][rank]
        assert two == pytest.approx(three, rel=1e-5)
        assert two[-1] < two[0]
