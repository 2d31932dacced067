"""A base in fp8 under an adapter that answers: the layers that its run had in fp8."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainkit.lora.quant import refuse_unfit_device
from trainkit.models.fp8.choice import Fp8Choice
from trainkit.models.linears import packed_kind
from trainkit.run.directory import RunDirectory
from trainkit.run.files import read_json


def pack(model: Any, quantize: str, device: torch.device, run: Path | None) -> Any:
    """A loaded model on the device, its linear layers kept as a run kept them.

    Args:
        model: on the host.
        quantize: a kind of linear layer that is packed when the model is there.
        device: where it will answer.
        run: of the adapter; None packs every layer that fits.

    Raises:
        RecipeError: the device cannot multiply so.
    """
    refuse_unfit_device(quantize, device)
    convert = packed_kind(quantize).convert
    assert convert is not None
    convert(model, device, _left_in_16_bits(model, run))
    return model.to(device)


def packs_late(quantize: str) -> bool:
    """Whether a model is packed after it is loaded, and not while."""
    return packed_kind(quantize).convert is not None


def _left_in_16_bits(model: nn.Module, run: Path | None) -> Collection[str]:
    """What the run did not have in fp8 in both directions."""
    kernels: Any = None if run is None else read_json(RunDirectory(run).kernels)
    record = (kernels or {}).get("fp8") or {}
    if "groups" not in record:
        return ()
    chosen = Fp8Choice.of(record).directions
    return [name for name, _ in model.named_modules() if name and not all(chosen.get(name, (0,)))]
