"""What two ranks run for packed rows: the leak test through the engine, and training steps."""

import torch
from lab import zero_engine
from models.loss_head_cases import LEARNING_RATE, make_qwen2, patched
from torch import distributed as dist

from trainkit.errors import TrainkitError
from trainkit.models import attention
from trainkit.models.attention import pattern
from trainkit.models.leak_test import leak_test, packed_inputs

LENGTHS = ((7, 5), (4, 9))
"""Documents of the one row of each rank; both rows end in padding."""
ROW = 16
STEPS = 2


def tokens():
    return torch.randint(0, 64, (2, ROW), generator=torch.Generator().manual_seed(0))


def num_items():
    return sum(length - 1 for row in LENGTHS for length in row)


def plain_parameters():
    """One process, plain Hugging Face, every document alone."""
    model = make_qwen2(64, tie_word_embeddings=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for _ in range(STEPS):
        for row, inside in zip(tokens(), LENGTHS, strict=True):
            for document in row[: sum(inside)].split(inside):
                ids = document[None]
                model(input_ids=ids, labels=ids, num_items_in_batch=num_items()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def packed_row(rank):
    packed = packed_inputs(LENGTHS[rank : rank + 1], ROW)
    ids = tokens()[rank : rank + 1]
    labels = ids.masked_fill(packed["position_ids"] == 0, -100)
    labels[:, sum(LENGTHS[rank]) :] = -100
    return {"input_ids": ids, "labels": labels, **packed}


def run_documents_together():
    """Break the isolation: all documents of a row are one. Returns what undoes it."""
    spans = pattern.Pattern.spans
    pattern.Pattern.spans = property(lambda self: [(slice(None), 0, self.length)])
    return lambda: setattr(pattern.Pattern, "spans", spans)


def leaking_run(cwd):
    """A command where attention runs the documents together, and no proof of a layer sees it."""
    from commands import run_command

    from trainkit.models.attention import proof

    run_documents_together()
    proof._ROUNDINGS = 1e9  # so that the leak test is what finds it
    return run_command(cwd, ["sft", "--config", "small.yaml", "--output-dir", "run"])


def broken(engine):
    """What the leak test says when all documents of a row are one."""
    mend = run_documents_together()
    try:
        leak_test(engine, attention=attention.NAME, vocab_size=64)
    except TrainkitError as error:
        return str(error)
    finally:
        mend()
    return ""


def zero(stage):
    import deepspeed

    deepspeed.init_distributed("gloo")
    model = patched(tie=False)
    engine = zero_engine(model, stage, micro_batch=1, learning_rate=LEARNING_RATE)
    seen = leak_test(engine, attention=attention.NAME, vocab_size=64)
    batch = packed_row(dist.get_rank())
    for _ in range(STEPS):
        loss = engine(**batch, num_items_in_batch=num_items()).loss
        engine.backward(loss * dist.get_world_size())
        engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        pairs = zip(model.parameters(), plain_parameters(), strict=True)
        parameters = max((a - b).abs().max().item() for a, b in pairs)
    return {"seen": seen, "parameters": parameters, "broken": broken(engine)}
