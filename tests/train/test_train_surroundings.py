"""What the environment says of training is said by the recipe, or refused."""

import pytest

from trainkit.errors import RecipeError
from trainkit.run.environment import relevant_variables
from trainkit.train.prepare import refuse_contradicting_start, refuse_contradicting_variables


@pytest.mark.parametrize(
    ("name", "value", "key"),
    [
        ("ACCELERATE_DYNAMO_BACKEND", "EAGER", "training.torch_compile"),
        ("ACCELERATE_MIXED_PRECISION", "bf16", "training.bf16"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", "gradient_accumulation_steps"),
        ("ACCELERATE_USE_FSDP", "true", "fsdp2"),
        ("FSDP_OFFLOAD_PARAMS", "true", "fsdp2"),
        ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3", "deepspeed"),
    ],
)
def test_a_variable_that_trains_otherwise_is_refused(name, value, key):
    with pytest.raises(RecipeError, match=name) as refused:
        refuse_contradicting_variables({"PATH": "/bin", name: value})
    assert key in refused.value.fix
    refuse_contradicting_variables({name: "no"})


def test_what_a_run_sets_itself_does_not_stop_the_next_one(monkeypatch):
    refuse_contradicting_start.cache_clear()
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "inductor")
    for _ in range(2):
        with pytest.raises(RecipeError, match="ACCELERATE_DYNAMO_BACKEND"):
            refuse_contradicting_start()
    monkeypatch.delenv("ACCELERATE_DYNAMO_BACKEND")
    refuse_contradicting_start()
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "inductor")  # as transformers does
    refuse_contradicting_start()


@pytest.mark.parametrize(
    "name",
    ["FSDP_VERSION", "TORCHDYNAMO_DISABLE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NCCL_ALGO",
     "DS_SKIP_CUDA_CHECK", "PYTORCH_CUDA_ALLOC_CONF", "CUBLASLT_WORKSPACE_SIZE", "KMP_BLOCKTIME"],
)  # fmt: skip
def test_what_changes_numbers_or_speed_is_recorded(name):
    assert relevant_variables({name: "1", "HOME": "/root"}) == {name: "1"}
