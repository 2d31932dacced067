"""Step 1 of "add an op": what it means, in plain torch, rounding as Hugging Face does."""

from torch.nn import functional as F


def silu_mul_reference(gate, up):
    return F.silu(gate) * up
