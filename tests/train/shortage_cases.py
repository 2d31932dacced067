"""A GPU without memory: micro-batches of too many rows run out of it."""

import os
from unittest import mock


def without_memory(most_rows, *, from_step=0, on_rank=None, row_tokens=0):
    """Within, more rows than ``most_rows`` do not fit, from a step on; packed ones by tokens."""
    import torch

    from trainkit.train.loop import Loop

    plain = Loop.prepare

    def prepare(self, inputs):
        prepared = plain(self, inputs)
        is_here = on_rank in (None, int(os.environ.get("RANK", "0")))
        ids = inputs["input_ids"]
        rows = ids.numel() / row_tokens if row_tokens else ids.shape[0]
        is_large = self.model.training and rows > most_rows
        if is_here and is_large and self.state.global_step >= from_step:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has")
        return prepared

    return mock.patch.object(Loop, "prepare", prepare)


def sft(cwd, argv, **shortage):
    """``trainkit sft`` on the ranks, of which one has too little memory."""
    from commands import run_command

    with without_memory(**shortage):
        return run_command(cwd, ["sft", *argv])


def sft_on_gpus(cwd, argv, memory_gib, peaks_gib):
    """``trainkit sft`` on ranks that pass for GPUs with so much memory and such peaks."""
    from dataclasses import replace

    import torch
    from commands import run_command

    from trainkit.estimate.gpus import GPUS
    from trainkit.train import log as meter

    gpu = replace(GPUS["h100"], memory_gib=memory_gib)
    peak = int(peaks_gib[int(os.environ["RANK"])] * 2**30)
    with (
        mock.patch.object(meter, "this_gpu", return_value=gpu),
        mock.patch.object(torch.cuda, "max_memory_allocated", return_value=peak),
        mock.patch("trainkit.estimate.estimate.suggest", return_value=[]),  # a step for each way
    ):
        return run_command(cwd, ["sft", *argv])
