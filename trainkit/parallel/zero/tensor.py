"""DeepSpeed's AutoTP under ZeRO-1: ranks compute parts of the layers' matrix products.

The layers' linear maps are split as transformers' plan for the class says: the first ones by
outputs, the last ones by inputs. Embeddings and the head stay whole on each rank: the head has the
loss in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.module_inject.auto_tp import AutoTP
from deepspeed.module_inject.autotp_config import AutoTPConfig
from deepspeed.module_inject.layers import (
    LinearAllreduce,
    LinearLayer,
    TensorParallel_Layer,
    set_autotp_mode,
)
from deepspeed.module_inject.tp_plan_converter import TPPlanConverter
from deepspeed.runtime.tensor_parallel.config import _get_hf_tp_plan
from deepspeed.utils import groups
from torch import nn
from torch.nn.functional import cross_entropy

from trainkit.errors import ModelError, TrainkitError
from trainkit.evaluation_mode import evaluation_mode
from trainkit.parallel.engine import Saving
from trainkit.parallel.zero.engine import DeepSpeed

_PARSED = "ds_autotp_parsed"
"""The mark on a model that DeepSpeed's engine leaves as it is."""

_SPLIT_BY = {LinearLayer: {"weight": 0, "bias": 0}, LinearAllreduce: {"weight": 1}}
"""The dimension that each rank has a part of; what is not named is whole."""


class TensorParallel(DeepSpeed):
    """ZeRO-1 over the data ranks, and matrix products over ``size`` neighbours."""

    shards_weights = True

    def __init__(self, path: Path, size: int) -> None:
        super().__init__(path)
        self._size = size

    def training_arguments(self, *, num_micro_batches: int) -> dict[str, Any]:
        """The configuration, with the size; the ranks of a group read the same rows."""
        given = super().training_arguments(num_micro_batches=num_micro_batches)
        given["deepspeed"]["tensor_parallel"] = {"autotp_size": self._size}
        return given

    def loading_device(self, device: torch.device) -> torch.device | None:
        """Whole weights are loaded where they train, and split there."""
        return device

    def place(self, model: nn.Module, device: torch.device) -> None:
        """Split the layers' linear maps; before the optimizer is made."""
        plan = _plan_of_layers(model)
        refuse_heads(model, self._size)
        whole = _small_step(model, device)
        set_autotp_mode(training=True)
        groups._init_tp_mesh_device(tensor_model_parallel_size=self._size)
        try:
            specs = TPPlanConverter.convert(plan)
        except ValueError as error:
            raise _no_plan(model, str(error).partition(". ")[0]) from error
        splitting = AutoTP(
            module=model,
            all_reduce_linears=(),
            prefix="",
            state_dict=None,
            linear_layer_setting=(nn.Linear, nn.Embedding),
            orig_layer_impl=None,
            partition_config=AutoTPConfig(tp_size=self._size, layer_specs=specs),
            model_config=model.config,
            training_mode=True,
        )
        splitting.set_tensor_parallel_config(self._size, groups.get_tensor_model_parallel_group())
        splitting.update_linear_policies()
        splitting._replace_module(model)
        splitting.register_replicated_grad_hooks(model)
        setattr(model, _PARSED, True)
        _require_split(model)
        _require_same(whole, _small_step(model, device), next(model.parameters()).dtype)

    def save_weights(self, save: Saving, write: Callable[[Mapping[str, Any]], None]) -> None:
        whole = self.whole_weights(self.model, keep=bool(self.args.should_save))
        if self.args.should_save:
            save.defer(None, partial(write, whole))

    def whole_weights(self, model: nn.Module, *, keep: bool) -> dict[str, torch.Tensor]:
        """Gather the weights one by one; every rank calls it.

        The parameters stay as they are: DeepSpeed's own function puts the whole weights into them
        and splits them again.
        """
        dims = {
            f"{prefix}.{name}": (layer, dim)
            for prefix, layer in model.named_modules()
            if isinstance(layer, TensorParallel_Layer)
            for name, dim in _SPLIT_BY[type(layer)].items()
        }
        whole: dict[str, torch.Tensor] = {}
        seen: dict[int, str] = {}
        for name, held in model.state_dict(keep_vars=True).items():
            first = seen.setdefault(id(held), name)
            if first != name:  # tied
                whole[name] = whole[first]
                continue
            gathered = held.detach()
            if name in dims:
                layer, dim = dims[name]
                gathered = layer._all_gather_shards(gathered, layer._partition_sizes, dim)
            whole[name] = gathered.to("cpu", copy=True) if keep else gathered.new_empty(0)
        return whole


Outcome = dict[str, torch.Tensor]
"""``logits``, and the gradients of parameters by name."""


def _small_step(model: Any, device: torch.device) -> Outcome:
    """What a few tokens give: logits, and the gradients of vectors, such as those of norms.

    A vector is rarely split, and what reaches it has gone through the products around it.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    tokens = torch.randint(0, vocabulary, (2, 16), generator=generator).to(device)
    with evaluation_mode(model):
        logits = model(input_ids=tokens, use_cache=False).logits.float()
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    vectors = {n: p for n, p in model.named_parameters() if p.requires_grad and p.dim() == 1}
    found = torch.autograd.grad(loss, list(vectors.values()), allow_unused=True)
    gradients = {n: g.float() for n, g in zip(vectors, found, strict=True) if g is not None}
    return {"logits": logits.detach(), **gradients}


def _require_same(whole: Outcome, split: Outcome, dtype: torch.dtype) -> None:
    """Hold a split model against the whole one.

    Allowed is the root of the dtype's step: as far from one rounding as from an error of order one.
    """
    allowed = math.sqrt(torch.finfo(dtype).eps)
    largest = max((g.norm() for n, g in whole.items() if n != "logits"), default=torch.zeros(()))
    for name, wanted in whole.items():
        found = split.get(name)
        if found is None or found.shape != wanted.shape:
            continue  # its own part is here
        size = wanted.norm() if name == "logits" else torch.maximum(wanted.norm(), largest / 100)
        error = ((found - wanted).norm() / size).item()
        if not error <= allowed:
            raise ModelError(
                f"with its matrix products split over ranks the model computes something else: "
                f"{name if name == 'logits' else f'the gradient of {name}'} is off by {error:.2e}",
                where="parallel.tensor",
                fix="remove it, and report this with the model's name",
            )


def _plan_of_layers(model: nn.Module) -> dict[str, str]:
    """Transformers' plan, without what is outside the layers."""
    plan = {
        name: style
        for name, style in (_get_hf_tp_plan(model) or {}).items()
        if "layers." in name and style not in _DOES_NOTHING
    }
    if not plan:
        raise _no_plan(model, "transformers has no plan for it")
    return plan


_DOES_NOTHING = frozenset({"replicate", "replicated"})


def refuse_heads(model: Any, size: int) -> None:
    text = model.config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if heads % size:
        fitting = [n for n in range(2, heads + 1) if heads % n == 0]
        raise ModelError(
            f"{heads} key heads cannot be shared by {size} ranks",
            where="parallel.tensor",
            fix=f"set it to one of {', '.join(map(str, fitting))}" if fitting else "remove it",
        )


def _no_plan(model: Any, reason: str) -> ModelError:
    return ModelError(
        f"the matrix products of {model.config.model_type} cannot be split over ranks: {reason}",
        where="parallel.tensor",
        fix="remove it, or set parallel: {shard: zero3}",
    )


def _require_split(model: nn.Module) -> None:
    """Hold the outcome against what was asked for."""
    split = [each for each in model.modules() if isinstance(each, TensorParallel_Layer)]
    unknown = {type(each).__name__ for each in split if type(each) not in _SPLIT_BY}
    if unknown or not split:
        raise TrainkitError(
            f"layers were split in an unknown way: {', '.join(sorted(unknown))}"
            if unknown
            else "no layer was split, though parallel.tensor was asked for",
            where="parallel.tensor",
            fix="remove it, and report this with the model's name",
        )
