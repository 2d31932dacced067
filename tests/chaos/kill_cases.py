"""A training process that is killed at a given moment, and one that finishes what is left."""

import hashlib
import os
import signal
from pathlib import Path

from lab import Lab
from tiny import make_tokenizer

OPTIONS = {"batch": 2, "accumulate": 2, "dropout": 0.1, "max_steps": 12, "save_steps": 2}


def _digest(trainer):
    digest = hashlib.sha256()
    for name, value in sorted(trainer.model.state_dict().items()):
        digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()


def train(root, kill_at_write=None):
    """Train, or continue from the newest complete checkpoint; returns the digest of the weights.

    At the ``kill_at_write``-th call of fsync (inside a save) the process gets SIGKILL.
    """
    from trainkit.train.checkpoints import find_resume_point

    if kill_at_write is not None:
        _kill_at_fsync(kill_at_write)
    trainer = Lab(make_tokenizer(), Path(root)).trainer("run", save_total_limit=2, **OPTIONS)
    point = find_resume_point(Path(root, "run"))
    trainer.train(resume_from_checkpoint=None if point is None else str(point.checkpoint))
    return {"digest": _digest(trainer), "resumed_at": 0 if point is None else point.step}


def _kill_at_fsync(number):
    real, calls = os.fsync, iter(range(1, 10**9))

    def fsync(descriptor):
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        real(descriptor)

    os.fsync = fsync
