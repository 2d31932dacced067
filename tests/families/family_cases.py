"""What other processes run for the family tests; each function returns plain JSON values."""

import os

import torch
from families.family_models import exact, excess_errors, make, make_batch, run

import trainkit
from trainkit.models.families import FAMILIES

STEPS = 2
LEARNING_RATE = 0.1


def zero(stage):
    """Per family the largest difference of a parameter to one plain process after two steps."""
    import deepspeed

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    deepspeed.init_distributed("gloo")
    return {name: _zero_difference(name, stage, rank, world_size) for name in FAMILIES}


def _zero_difference(name, stage, rank, world_size):
    import deepspeed

    batch = make_batch(name, rows=2 * world_size)
    batch["attention_mask"].fill_(1)  # as many trained tokens on every rank
    batch["labels"][:, 4:] = batch["input_ids"][:, 4:]
    plain = make(name)
    optimizer = torch.optim.SGD(plain.parameters(), lr=LEARNING_RATE)
    for _ in range(STEPS):
        plain(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    model = make(name)
    trainkit.patch(model)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        },
    )
    part = {key: value.chunk(world_size)[rank] for key, value in batch.items()}
    for _ in range(STEPS):
        engine.backward(engine(**part).loss)
        engine.step()
    largest = 0.0
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        with deepspeed.zero.GatheredParameters([found], enabled=stage == 3):
            largest = max(largest, (found - expected).abs().max().item())
    engine.destroy()
    return largest


def interpreted(name):
    """The family's excess errors with its Triton kernels, fp32, under the interpreter."""
    from trainkit.kernels import interpreter

    interpreter.install()
    model = make(name)
    plain = run(model, make_batch(name))
    truth = run(exact(make(name)), make_batch(name))
    trainkit.patch(model)
    return excess_errors(plain, run(model, make_batch(name)), truth)
