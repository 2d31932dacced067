"""Runs that meet a number that is none at a chosen step; for one process and for ranks."""

import hashlib
import os
from pathlib import Path

STEP = 6
"""The optimizer step that goes wrong; checkpoint-3 is there, checkpoint-6 must not be."""

KINDS = ("loss", "gradient", "weights")


def poison(trainer, kind):
    """Make the loss or a gradient of step 6 NaN or infinite; the weights: see `broken_run`."""
    import torch

    def is_now():
        return trainer.state.global_step == STEP - 1

    model = trainer.model
    if kind == "loss":

        def spoil(module, inputs, output):
            return output * float("nan") if is_now() and torch.is_grad_enabled() else output

        model.lm_head.register_forward_hook(spoil)
    elif kind == "gradient":
        norm = model.model.layers[0].input_layernorm
        norm.register_full_backward_hook(
            lambda module, inputs, outputs: (inputs[0] * float("inf"),) if is_now() else None
        )
    else:
        # As a far too high rate does: loss and gradient are finite, the update is not.
        from transformers import TrainerCallback

        from trainkit.parallel.parameters import own_part

        class Overflow(TrainerCallback):
            def on_step_end(self, args, state, control, **_):
                if state.global_step == STEP:
                    with torch.no_grad():
                        for parameter in model.parameters():
                            own_part(parameter).fill_(float("inf"))

        trainer.add_callback(Overflow())


def broken_run(root, kind, *, stage=0, shard=None, dtype=None, poisoned_rank=None, **options):
    """What the run says, the checkpoints that are left, and whether its weights are sound."""
    import torch
    from distributed.zero_cases import zero_file
    from lab import Lab
    from tiny import make_tokenizer
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from trainkit.train.faults.numbers import NumberError

    shard = shard or (zero_file(root, stage) if stage else "none")
    lab = Lab(make_tokenizer(), Path(root))
    for number, sample in enumerate(lab.samples):
        sample["id"] = f"train.jsonl:{number + 1}"
    settings = {"batch": 2, "logging_steps": 10, "save_total_limit": 1, **options}
    trainer = lab.trainer("run", dtype=dtype, shard=shard, **settings)
    if poisoned_rank is None or int(os.environ.get("RANK", 0)) == poisoned_rank:
        poison(trainer, kind)
    said, updates = None, []
    hook = register_optimizer_step_post_hook(lambda *_: updates.append(1))
    try:
        trainer.train()
    except NumberError as error:
        said = str(error)
    hook.remove()
    left = sorted(path.name for path in Path(root, "run").glob("*"))
    sound = all(bool(torch.isfinite(p).all()) for p in trainer.model.parameters() if p.numel())
    return {"said": said, "left": left, "sound": sound, "num_updates": len(updates)}


def left_out(root, *, stage=0, shard=None, dtype=None, poisoned_rank=None, **training):
    """A run that skips a NaN and a spike, and one that is told before which steps to leave out.

    Returns their digests of the weights, what the first one said, and their logged rows.
    """
    import gc

    from accelerate.state import AcceleratorState
    from distributed.zero_cases import zero_file
    from lab import Lab
    from tiny import make_tokenizer

    from trainkit.train.faults.numbers import NumberPolicy

    shard = shard or (zero_file(root, stage) if stage else "none")
    said, digests, rows = [], [], []
    watching = {"spike": 8.0, "window": 3}
    for policy in (
        NumberPolicy("skip", **watching),
        NumberPolicy(passed_over=frozenset({5, 6}), **watching),
    ):
        lab = Lab(make_tokenizer(), Path(root))
        for number, sample in enumerate(lab.samples):
            sample["id"] = f"train.jsonl:{number + 1}"
        given = {"numbers": policy, "warn": said.append}
        options = {"batch": 2, "accumulate": 2, "save_strategy": "no", **training}
        trainer = lab.trainer(
            f"run{len(digests)}", dtype=dtype, shard=shard, given=given, **options
        )
        is_here = poisoned_rank is None or int(os.environ.get("RANK", 0)) == poisoned_rank
        if policy.on_bad == "skip" and is_here:
            _spoil(trainer, {5: 100.0, 6: float("nan")})
        trainer.train()
        digests.append(_digest(trainer.model))
        rows.append([row for row in trainer.state.log_history if "learning_rate" in row])
        del trainer
        gc.collect()
        AcceleratorState._reset_state()
    keys = ("step", "loss", "learning_rate", "grad_norm", "num_skipped_steps")
    return {
        "digests": digests,
        "said": said,
        "rows": [[[row.get(key) for key in keys] for row in each] for each in rows],
    }


def _digest(model):
    """Of what this rank has of the weights."""
    import torch

    from trainkit.parallel.parameters import own_part

    digest = hashlib.sha256()
    for parameter in model.parameters():
        part = own_part(parameter).detach().contiguous()
        digest.update(part.flatten().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def _spoil(trainer, factors):
    plain = trainer.micro_loss

    def spoiled(*given, **named):
        return plain(*given, **named) * factors.get(trainer.state.global_step + 1, 1.0)

    trainer.micro_loss = spoiled
