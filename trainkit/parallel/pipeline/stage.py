"""One stage: a range of layers of a causal language model, run by the model's own forward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from trainkit.parallel.pipeline.share import Share
from trainkit.parallel.pipeline.skeleton import Elsewhere, causal_lm, decoder

_OF_THE_LOSS = ("labels", "num_trained_tokens", "source_ids", "num_items_in_batch")
"""Of a batch: what only the last stage takes."""

RunLoss = Callable[[nn.Module, dict[str, Any]], Any]
"""Takes a model that ends with a head, and a batch; returns the loss."""


class Stage(nn.Module):
    """Token ids or hidden states in, hidden states or what ``run`` returns out.

    The model's own forward builds masks and rotary tables on every stage; layers of other stages
    let the states pass. Parameters and layers are shared with the model.

    Args:
        model: cut to this rank's share, adapters and kernels in it.
        index: of the stage.
        share: of this rank.
        autocast: what the forward pass runs under.
    """

    def __init__(
        self,
        model: nn.Module,
        index: int,
        share: Share,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        super().__init__()
        base, inner = causal_lm(model), decoder(model)
        layers = share.stages[index]
        self.index = index
        self.is_first, self.is_last = index == 0, index == share.num_stages - 1
        kept = [
            layer if number in layers else Elsewhere() for number, layer in enumerate(inner.layers)
        ]
        changed: dict[str, nn.Module] = {"layers": nn.ModuleList(kept)}
        if not self.is_last:
            changed["norm"] = Elsewhere()
        if not self.is_first:
            changed["embed_tokens"] = Elsewhere()
        body = _twin(inner, changed)
        self.body = _twin(base, {base.base_model_prefix: body}) if self.is_last else body
        self._layers = kept
        self._autocast = autocast

    def layers(self) -> list[nn.Module]:
        """Of the model; those of other stages have an empty module here."""
        return self._layers

    def run(self, states: torch.Tensor, batch: Mapping[str, Any], loss: RunLoss) -> Any:
        """The stage's part of a forward pass.

        Args:
            states: (B, S, H) from the stage before; the first stage reads ``batch`` instead.
            batch: as the collator made it, on the device.
            loss: what the last stage returns.
        """
        given = {name: value for name, value in batch.items() if name != "input_ids"}
        if self.is_first:
            given["input_ids"] = batch["input_ids"]
        else:
            given["inputs_embeds"] = states
        with self._autocast():
            if self.is_last:
                return loss(self.body, given)
            given = {name: value for name, value in given.items() if name not in _OF_THE_LOSS}
            return self.body(**given, use_cache=False).last_hidden_state


def _twin(module: nn.Module, changed: Mapping[str, nn.Module]) -> nn.Module:
    """The same module with other children; parameters, buffers and hooks stay shared."""
    twin = copy.copy(module)
    twin._modules = {**module._modules, **changed}
    return twin
