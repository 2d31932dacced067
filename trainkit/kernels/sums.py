"""Sums over rows: gradients of biases."""

import torch
from torch import Tensor

from trainkit.kernels.launch import is_on_gpu


def column_sums(rows: Tensor) -> Tensor:
    """(N,) of (T, N).

    On a GPU a product with ones is as exact as torch's sum of 16-bit rows and takes two thirds of
    its time (27 and 41 us for 32768 x 896 on an H200).
    """
    if is_on_gpu(rows) and rows.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(rows.new_ones((1, len(rows))), rows)[0]
    return rows.sum(0)
