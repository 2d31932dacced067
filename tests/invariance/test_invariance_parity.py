"""Where transformers' Trainer is right our loop trains what it trains, to the last bit.

37 ragged samples, so epochs end in a short step and a short micro-batch. Plain Hugging Face models
without our kernels; the Trainer is here as the reference alone.
"""

import pytest
from invariance.parity_cases import differences
from ranks import run_ranks

CASES = {
    "full-autocast": {"batch": 4, "bf16": True, "dropout": 0.1},
    "lora": {"batch": 2, "lora": True, "bf16": True, "accumulate": 2, "max_grad_norm": 0.5},
    "accumulation": {
        "batch": 2,
        "accumulate": 4,
        "dropout": 0.1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 5,
        "logging_steps": 3,
    },
    "unclipped": {
        "batch": 4,
        "max_grad_norm": 0.0,
        "weight_decay": 0.1,
        "optim": "adafactor",
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 3,
    },
    "epochs": {
        "batch": 2,
        "accumulate": 2,
        "steps": -1,
        "num_train_epochs": 2.5,
        "gradient_checkpointing": True,
        "neftune_noise_alpha": 5.0,
        "lr_scheduler_type": "inverse_sqrt",
    },
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_that_of_transformers_trainer(case, tmp_path):
    assert differences(tmp_path, **CASES[case]) == []


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_two_ranks_of_ddp_are_those_of_transformers_trainer(lora, tmp_path):
    options = {"batch": 2, "accumulate": 2, "steps": 12, "lora": lora, "dropout": 0.1}
    case = "invariance.parity_cases:differences"
    assert run_ranks(case, root=str(tmp_path), **options) == [[], []]
