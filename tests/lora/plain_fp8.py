"""A frozen layer in e4m3 by torch alone, in fp64: what rounds is written out, nothing else does."""

import torch
from torch import nn

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16


def rounded(rows):
    """A row in e4m3 and back, by torch alone: the largest magnitude at most 448 steps."""
    largest = rows.double().abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
    scale = torch.exp2(torch.ceil(torch.log2(largest / 448)))
    return (rows.double() / scale).float().to(FP8).double() * scale


def rounded_activations(rows):
    """The same with the largest magnitude at 256 steps, which is a code."""
    scale = rows.double().abs().amax(-1, keepdim=True) / 256
    return (rows.double() / scale).float().to(FP8).double() * scale


class PlainFp8(torch.autograd.Function):
    """x W^T + b with both rounded; dx from dy times W's scales, rounded, and the same W.

    Either result is rounded to bf16, as tensor cores give it.
    """

    @staticmethod
    def forward(ctx, x, weight, bias):
        stored = rounded(weight)
        scale = torch.exp2(torch.ceil(torch.log2(weight.double().abs().amax(1) / 448)))
        ctx.save_for_backward(stored, scale)
        y = rounded_activations(x) @ stored.t()
        return (y if bias is None else y + bias.double()).to(BF16).double()

    @staticmethod
    def backward(ctx, dy):
        stored, scale = ctx.saved_tensors
        dx = rounded(dy * scale) @ (stored / scale[:, None])
        return dx.to(BF16).double(), None, None


class PlainFp8Linear(nn.Linear):
    """A frozen layer whose products are these."""

    def forward(self, x):
        return PlainFp8.apply(x, self.weight, self.bias)


def plain_fp8(model):
    """A loaded model, its output layer apart, with such layers."""
    head = model.get_output_embeddings()
    for module in model.modules():
        if type(module) is nn.Linear and module is not head:
            module.__class__ = PlainFp8Linear
