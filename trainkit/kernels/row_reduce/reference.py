"""Row maximum and minimum in plain torch, with the tie rule torch leaves open."""

import torch
from torch import Tensor


def row_max_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """(values, indices) of the largest element over the last axis; NaN wins, then the first."""
    indices = _first_index(x, largest=True)
    return x.gather(-1, indices.unsqueeze(-1)).squeeze(-1), indices


def row_min_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """(values, indices) of the smallest element over the last axis; NaN wins, then the first."""
    indices = _first_index(x, largest=False)
    return x.gather(-1, indices.unsqueeze(-1)).squeeze(-1), indices


def _first_index(x: Tensor, *, largest: bool) -> Tensor:
    extreme = (x.amax if largest else x.amin)(dim=-1, keepdim=True)  # NaN propagates
    hit = torch.where(extreme.isnan(), x.isnan(), x == extreme)
    columns = torch.arange(x.shape[-1], device=x.device)
    return torch.where(hit, columns, x.shape[-1]).amin(dim=-1)
