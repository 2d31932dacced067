"""Training processes whose writes are slow, or fail."""

import errno
import hashlib
import os
import time
from pathlib import Path

from distributed.zero_cases import zero_file
from lab import Lab
from tiny import make_tokenizer


def _trainer(root, name, stage, **options):
    shard = zero_file(root, stage) if stage else "none"
    options = {"batch": 2, "max_steps": 6, "save_steps": 2, "save_total_limit": 9, **options}
    return Lab(make_tokenizer(), Path(root)).trainer(name, shard=shard, **options)


def slow(root, name, stage, seconds, **options):
    """Train while every file takes so long to write; rank 0 gives digests of what was saved."""
    import torch

    plain, steps = torch.save, []

    def save(*arguments, **keywords):
        time.sleep(seconds)
        plain(*arguments, **keywords)

    torch.save = save
    trainer = _trainer(root, name, stage, **options)
    trainer.checkpoints.committed = lambda path: steps.append(trainer.state.global_step)
    trainer.train()
    run = Path(trainer.args.output_dir)
    found = {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(run.rglob("*"))
        if path.suffix in (".safetensors", ".pt", ".pth")
    }
    return {"files": found, "steps": steps}


def full(root, stage, number=errno.ENOSPC):
    """Rank 1 cannot write the second checkpoint; gives what each rank says."""
    import torch

    from trainkit.errors import CheckpointError

    trainer = _trainer(root, "full", stage, max_steps=30)
    trainer.checkpoints.failed = trainer.stop.fail
    if os.environ["RANK"] == "1" or os.environ["WORLD_SIZE"] == "1":
        plain = torch.save

        def save(value, path, *arguments, **keywords):
            if "checkpoint-4" in str(path) and "rng_state" not in str(path):
                raise OSError(number, os.strerror(number), str(path))
            plain(value, path, *arguments, **keywords)

        torch.save = save
    try:
        trainer.train()
    except CheckpointError as error:
        return {"said": str(error), "step": trainer.state.global_step}
    return {"said": "nothing", "step": trainer.state.global_step}


def copied(root, name, stage, **options):
    """Blocks of pinned memory that are made after the first step, and those of the first save."""
    from trainkit.parallel import engine
    from trainkit.train import saves

    given, taken, plain = [], [], engine._copy_tensor

    def copy(tensor, copies):
        before = len(copies)
        found = plain(tensor, copies)
        if len(copies) > before:
            taken.append(_block(tensor))
        return found

    def pin(tensors):
        given.extend(map(_block, tensors))

    engine._copy_tensor, saves.pin_ahead = copy, pin
    _trainer(root, name, stage, max_steps=3, save_steps=2, **options).train()
    return {"given": given, "taken": taken[: len(taken) // 2]}  # two saves: steps 2 and 3


def _block(tensor):
    """As torch keeps pinned memory: by the next power of two."""
    size = tensor.numel() * tensor.element_size()
    return 1 << max(size - 1, 0).bit_length()
