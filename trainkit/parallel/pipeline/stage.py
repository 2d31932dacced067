"""One stage: a range of layers of a causal language model, run by the model's own forward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from trainkit.parallel.pipeline.share import Share

# A model of which this rank holds a part: the rest of it has names and shapes, but no memory.
#
# It is loaded with its own weights only; adapters and kernels are put into the whole of it, so
# that they are numbered and initialised as in one process; then the rest is cut away.


class Elsewhere(nn.Module):
    """Stands where another rank's module was; states pass through."""

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """The states as they came."""
        return hidden_states


def causal_lm(model: nn.Module) -> Any:
    """The model under adapters, or itself."""
    get_base: Any = getattr(model, "get_base_model", None)
    return model if get_base is None else get_base()


def decoder(model: nn.Module) -> Any:
    """Embeddings, layers and norm."""
    base = causal_lm(model)
    return getattr(base, base.base_model_prefix)


def foreign(model: nn.Module, share: Share, *, ties: bool) -> list[tuple[nn.Module, str]]:
    """The modules that other ranks hold: (parent, name of the child).

    Args:
        model: whole.
        share: of this rank.
        ties: the head is the embeddings' weight: both ends then hold both.
    """
    base, inner = causal_lm(model), decoder(model)
    layers = [
        (inner.layers, str(index))
        for index in range(len(inner.layers))
        if index not in share.layers
    ]
    has_end = share.has_first or share.has_last
    ends = []
    if not (has_end if ties else share.has_first):
        ends.append((inner, "embed_tokens"))
    if not (has_end if ties else share.has_last):
        ends.append((base, "lm_head"))
    if not share.has_last:
        ends.append((inner, "norm"))
    return [*layers, *ends]


def loading_class(model_class: type, share: Share) -> type:
    """A class whose ``from_pretrained`` reads this rank's weights only; see `whole_skeleton`."""

    class Loading(model_class):
        _keys_to_ignore_on_load_unexpected = (r".*",)  # those of other ranks are in the files, too

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            ties = bool(self.config.tie_word_embeddings)
            set_aside = [
                (parent, name, parent._modules[name])
                for parent, name in foreign(self, share, ties=ties)
            ]
            for parent, name, _ in set_aside:
                parent._modules[name] = Elsewhere()
            object.__setattr__(self, "set_aside", set_aside)
            if not (share.has_first or share.has_last):
                self.all_tied_weights_keys: dict[str, str] = {}

    Loading.__name__, Loading.__qualname__ = model_class.__name__, model_class.__qualname__
    Loading.__module__ = model_class.__module__
    return Loading


def whole_skeleton(model: Any, model_class: type) -> Any:
    """Put what was set aside back, without memory; the model is of its own class again."""
    for parent, name, module in model.set_aside:
        module.to("meta")
        parent._modules[name] = module
    del model.set_aside
    model.__class__ = model_class
    if model.config.tie_word_embeddings:
        causal_lm(model).lm_head.weight = decoder(model).embed_tokens.weight
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
    return model


def cut_away(model: nn.Module, share: Share) -> None:
    """Leave this rank's modules in a model, which may be whole or a skeleton."""
    base = causal_lm(model)
    for parent, name in foreign(model, share, ties=bool(base.config.tie_word_embeddings)):
        parent._modules[name] = Elsewhere()


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


# Checkpointing by the stage, for schedules that split the backward pass in two.
#
# Layers checkpointed one by one are recomputed for each call of autograd: once for the gradient
# of a stage's input, and once more for each group of its weights. A stage as a whole is
# recomputed once when its backward pass begins, and kept until its weights have their gradients.
# That takes no more memory, for what the weights' part needs has to stay that long either way.


@contextmanager
def layers_kept(stages: Sequence[Stage]) -> Iterator[bool]:
    """Have no layer checkpoint itself; says whether any would have."""
    layers = dict.fromkeys(
        layer
        for stage in stages
        for layer in stage.modules()
        if isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing
    )
    for layer in layers:
        layer.gradient_checkpointing = False
    try:
        yield bool(layers)
    finally:
        for layer in layers:
            layer.gradient_checkpointing = True


class TwiceRun:
    """Forward passes that are run without a graph, and again with one; with the same dropout."""

    def __init__(self) -> None:
        self._random: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def first(self, number: int, device: torch.device, run: Callable[[], Any]) -> Any:
        """Run the forward pass of a micro-batch, and keep nothing but its result."""
        on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._random[number] = torch.get_rng_state(), on_gpu
        with torch.no_grad():
            return run()

    def again(self, number: int, device: torch.device, run: Callable[[], Any]) -> Any:
        """Run it once more, for the backward pass; what comes next draws as if it had not been."""
        on_cpu, on_gpu = self._random.pop(number)
        devices = [] if on_gpu is None else [device]
        with torch.random.fork_rng(devices), torch.enable_grad():
            torch.set_rng_state(on_cpu)
            if on_gpu is not None:
                torch.cuda.set_rng_state(on_gpu, device)
            return run()
