"""bf16 weights and several micro-batches a step, on ranks and in one process."""

import os
from pathlib import Path

from lab import Lab
from tiny import make_tokenizer


def train(root, batch, accumulate):
    """Losses and gradient norms of each step."""
    lab = Lab(make_tokenizer(), Path(root))
    options = {"batch": batch, "accumulate": accumulate, "max_steps": 3, "save_strategy": "no"}
    trainer = lab.trainer("run", dtype="bfloat16", learning_rate=0.0, **options)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return [[row["loss"], row["grad_norm"]] for row in rows]


def distance_from_exact_sum(root, stage, accumulate, **options):
    """The worst tensor's error of one step's gradient, over the norms of what is summed last.

    The truth is the float64 sum of the bf16 gradients of all ranks' micro-batches. What a strategy
    has summed is how far plain SGD at a rate of 64 moves its fp32 masters. Its last sum is that of
    the ranks, which may cancel one another. Half of all rows, drawn by chance, sums to half of the
    whole and half of every row's gradient with a random sign: the norms of two such halves are
    together the root of the squared norm of the whole and those of the rows.
    """
    import torch
    from deepspeed.utils import safe_get_full_fp32_param
    from distributed.zero_cases import zero_file
    from tiny import make_qwen2

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    num_rows = accumulate * world_size
    lab = Lab(make_tokenizer(), Path(root), num_samples=num_rows)
    trainer = lab.trainer(
        "run",
        dtype="bfloat16",
        shard=zero_file(root, stage) if stage else "none",
        **{"batch": 1, "accumulate": accumulate, "max_steps": 1, "save_strategy": "no"},
        **{"optim": "sgd", "learning_rate": 64.0, "lr_scheduler_type": "constant"},
        **{"max_grad_norm": 0.0, "weight_decay": 0.0, **options},
    )
    torch.manual_seed(1)
    plain = make_qwen2(len(lab.tokenizer)).to(torch.bfloat16)
    plain.load_state_dict(_whole(trainer.model))
    before = {name: p.detach().double() for name, p in plain.named_parameters()}
    exact = {name: torch.zeros_like(value) for name, value in before.items()}
    rows = dict.fromkeys(exact, 0.0)
    samples = lab.data(seed=1)
    batches = [samples.collator([sample]) for sample in lab.samples]
    total = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    for batch in batches[rank::world_size]:
        inputs = {key: batch[key] for key in ("input_ids", "labels", "attention_mask")}
        plain(**inputs, num_items_in_batch=total).loss.backward()
        for name, parameter in plain.named_parameters():
            exact[name] += parameter.grad.double()
            rows[name] += float(parameter.grad.double().norm()) ** 2
            parameter.grad = None
    for name, sum_ in exact.items():
        torch.distributed.all_reduce(sum_)
        torch.distributed.all_reduce(norms := sum_.new_tensor(rows[name]))
        rows[name] = float(norms)
    trainer.train()
    if stage:
        masters = {n: safe_get_full_fp32_param(p) for n, p in trainer.model.named_parameters()}
    else:
        pairs = {id(parameter): master for parameter, master in trainer.optimizer._pairs}
        masters = {n: pairs[id(p)] for n, p in trainer.model.named_parameters()}
    errors = []
    for name, sum_ in exact.items():
        error = float(((before[name] - masters[name].double()) / 64 - sum_).norm())
        whole = float(sum_.norm())
        errors.append(error / (whole + (whole**2 + rows[name]) ** 0.5))
    return max(errors)


def _whole(model):
    """All weights of a model that ZeRO-3 may have cut already."""
    import contextlib

    import deepspeed

    cut = [p for p in model.parameters() if hasattr(p, "ds_id")]
    with deepspeed.zero.GatheredParameters(cut) if cut else contextlib.nullcontext():
        return {name: value.detach().clone() for name, value in model.state_dict().items()}
