"""FSDP2 within a pipeline: the data ranks of a stage hold a part of each of its weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from trainkit.parallel.fsdp.engine import (
    compute_dtype,
    gathers_again,
    kept_whole,
    require_sharded,
    shard,
)
from trainkit.parallel.pipeline.share import Share
from trainkit.parallel.pipeline.skeleton import causal_lm, decoder


def shard_over(
    model: nn.Module, share: Share, mesh: DeviceMesh, device: torch.device
) -> dict[str, torch.dtype]:
    """Shard what a rank has of a model, in place, over the ranks that have the same.

    Args:
        model: cut.
        share: of this rank.
        mesh: of the data ranks.
        device: of this rank.

    Returns:
        The dtype that each parameter had, which it is saved in.
    """
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    half = compute_dtype(model)
    ignored = kept_whole(model, half)
    again = gathers_again(model, device)
    for unit in _units(model, share):
        shard(unit, mesh, half, ignored, gathers_twice=again)
    base = causal_lm(model)
    if base.config.tie_word_embeddings and (share.has_first or share.has_last):
        ends = decoder(model).embed_tokens, base.lm_head
        run, other = ends if share.has_first else reversed(ends)
        other.weight = run.weight
    require_sharded(model, ignored)
    return dtypes


def _units(model: nn.Module, share: Share) -> Iterator[nn.Module]:
    """What is gathered at a time: each layer, and what this rank runs of the ends."""
    yield from (each for each in model.modules() if isinstance(each, GradientCheckpointingLayer))
    if share.has_first:
        yield decoder(model).embed_tokens
    if share.has_last:
        yield decoder(model).norm
        yield causal_lm(model).lm_head


def part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """All of a tensor in the dtype that it is saved in; all ranks that have parts call it."""
    if not isinstance(tensor, DTensor):
        return tensor
    converted = tensor.to(dtype)
    assert isinstance(converted, DTensor)
    return converted.full_tensor()
