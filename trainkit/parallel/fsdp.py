"""torch's FSDP2: each rank holds a part of every weight, its gradient and its optimizer state.

``fully_shard`` is called on the model itself, layer by layer, before the optimizer is made; nothing
is asked of accelerate, whose own preparation takes gloo ranks for plain DDP without saying so.
Trained weights in half precision are kept as fp32 shards: these are the masters. They are rounded
before each gather, so what is computed with is what DDP computes with, and gradients are added up
over ranks and micro-batches in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from trainkit.checkpoint.weights.contents import taking_up
from trainkit.errors import ModelError, TrainkitError
from trainkit.parallel.engine import HALF_DTYPES, Engine, Saving, Training
from trainkit.parallel.launch import free_port
from trainkit.parallel.part_files import (
    KEY,
    empty_state,
    load_parts,
    optimizer_state,
    save_parts,
    take_up,
)
from trainkit.parallel.process import ProcessRank
from trainkit.parallel.slices import fill, names_in_files

STAYS_WHOLE = 1 / 8
"""Weights that take less of a GPU's memory stay gathered from forward to backward, which saves one
of three transfers; larger ones are gathered again."""


class InParts(Engine):
    """Weights that are saved as parts, and taken up by any number of ranks."""

    holds_whole_model = False
    shards_optimizer = True
    reshards = True

    def __init__(self) -> None:
        self._saved_dtypes: dict[str, torch.dtype] = {}

    def saved_dtype(self, name: str, parameter: nn.Parameter) -> torch.dtype:
        return self._saved_dtypes.get(name, parameter.dtype)

    def saved_bytes(self, name: str, parameter: nn.Parameter) -> int:
        """Twice: as it is loaded, and as it trains."""
        return self.saved_dtype(name, parameter).itemsize + parameter.element_size()

    def copied_by_a_save(self) -> list[torch.Tensor]:
        """None: all is written at once."""
        return []

    def _parts(self, *, of_optimizer: bool = True) -> dict[str, torch.Tensor]:
        """What this rank trains, by name: with the optimizer, its masters."""
        return dict(_trained(self.model))

    def _round(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Give the model what was loaded, where it is not its own already."""

    def save_state(self, save: Saving) -> None:
        """Each rank's part of trained weights and optimizer state."""
        state = optimizer_state(self.model, self.optimizer)
        save_parts({"model": self._parts(), KEY: state}, save.directory)

    def load_weights(self, model: nn.Module, read: Callable[[], None]) -> None:
        """With the state."""

    def load_state(self, folder: Path, step: int) -> None:
        """Take both up again; any number of ranks may have written them."""
        saved = empty_state(self.model, self.optimizer, folder, step)
        weights = self._parts()
        load_parts({"model": weights, KEY: saved}, folder)
        self._round(weights)
        with taking_up(folder):
            take_up(self.model, self.optimizer, saved, folder, step)

    def load_best(self, folder: Path, read: Callable[[], None]) -> None:
        weights = self._parts(of_optimizer=False)
        load_parts({"model": weights}, folder)
        self._round(weights)

    def whole_model(self, model: nn.Module, reload: Callable[[], nn.Module]) -> nn.Module:
        del model
        return reload()


class Fsdp2(InParts):
    """Weights, gradients and optimizer states in parts."""

    keeps_masters = True

    def prepare(self, process: ProcessRank, *, on_cpu: bool) -> None:
        """A single process without torchrun gets a process group of its own."""
        del on_cpu
        process.announce(free_port())

    def reads_parts(self, device: torch.device) -> Callable[[nn.Module], bool]:
        """A model that takes little of a GPU is loaded whole, and checked whole."""
        return partial(gathers_again, device=device)

    def place(self, model: nn.Module, device: torch.device) -> None:
        """Shard the model in place, over all ranks.

        The model is whole and the same on every rank, or without memory for the weights that are in
        files.
        """
        mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
        in_files = names_in_files(model)
        half = compute_dtype(model)
        self._saved_dtypes = {name: p.dtype for name, p in model.named_parameters()}
        ignored = kept_whole(model, half)
        gathers_twice = gathers_again(model, device)
        for unit in units_of(model):
            shard(unit, mesh, half, ignored, gathers_twice=gathers_twice)
        shard(model, mesh, half, ignored, gathers_twice=False)
        require_sharded(model, ignored)
        fill(model, in_files, self._saved_dtypes, device)
        model.register_forward_hook(give_back)

    def set_up(self, training: Training) -> nn.Module:
        """Autocast as for any model, and nothing around it."""
        self._hold(training)
        self._cast()
        return self._compiled()

    def save_weights(self, save: Saving, write: Callable[[Mapping[str, Any]], None]) -> None:
        is_adapter, keep = isinstance(self.model, PeftModel), bool(self.args.should_save)
        whole = self.whole_weights(self.model, keep=keep, adapters_only=is_adapter)
        if keep:
            save.attempt(partial(write, whole))
        if keep and not is_adapter:
            save.attempt(partial(save_config, self, self.model, save.directory))

    def whole_weights(
        self, model: nn.Module, *, keep: bool, adapters_only: bool
    ) -> dict[str, torch.Tensor]:
        """Gather the weights one by one; every rank calls it.

        With ``keep`` this rank writes them: they go to host memory. ``adapters_only`` leaves out
        frozen weights, except those of the embeddings.
        """
        parameters = dict(model.named_parameters(remove_duplicate=False))
        names: dict[nn.Parameter, str] = {}
        for name, each in parameters.items():
            names.setdefault(each, name)
        ends = {id(each) for end in _ends(model) for each in end.parameters()}
        whole: dict[str, torch.Tensor] = {}
        for name, value in model.state_dict().items():
            parameter = parameters.get(name)
            if parameter is None:
                whole[name] = value
                continue
            if adapters_only and not (parameter.requires_grad or id(parameter) in ends):
                continue
            first = names[parameter]
            if first in whole:  # tied
                whole[name] = whole[first]
                continue
            gathered = value.to(self.saved_dtype(first, parameter))
            gathered = gathered.full_tensor() if isinstance(gathered, DTensor) else gathered
            whole[name] = gathered.cpu() if keep else gathered.new_empty(0)
        return whole


def save_config(engine: Engine, model: Any, folder: Path) -> None:
    """With the dtype of the weights; ``save_pretrained`` has written that of the parts."""
    model.config.dtype = engine.saved_dtype(*next(iter(model.named_parameters())))
    model.config.save_pretrained(folder)


def compute_dtype(model: nn.Module) -> torch.dtype | None:
    """The half-precision dtype that a model's weights are in and gathered in; None for fp32."""
    found = {p.dtype for p in model.parameters() if p.dtype in HALF_DTYPES}
    if len(found) > 1:
        raise ModelError(
            "the model has weights in bfloat16 and in float16, and fsdp2 gathers in one dtype",
            where="parallel.shard",
            fix="set model.dtype: bfloat16",
        )
    return next(iter(found), None)


def kept_whole(model: nn.Module, half: torch.dtype | None) -> set[nn.Parameter]:
    """Parameters that stay whole on every rank: frozen ones that keep a dtype of their own.

    A model may ask for some small weights (routers, scales) in fp32 among others in half
    precision. Gathering would round them.
    """
    others = {
        name: p
        for name, p in model.named_parameters()
        if half is not None
        and p.dtype != half
        and not (p.requires_grad and hasattr(model, "peft_config"))
    }
    trained = [name for name, p in others.items() if p.requires_grad]
    if trained:
        raise ModelError(
            f"{', '.join(trained[:3])}: kept in float32 among weights in half precision, and fsdp2 "
            "would compute with them in half precision",
            where="parallel.shard",
            fix="set parallel: {shard: zero3}, or model.dtype: float32",
        )
    return set(others.values())


def units_of(model: nn.Module) -> Iterator[nn.Module]:
    """What is gathered at a time: each layer, and each end that shares its weight with nothing."""
    yield from (each for each in model.modules() if isinstance(each, GradientCheckpointingLayer))
    ends = [end for end in _ends(model) if next(end.parameters(), None) is not None]
    weights = [set(end.parameters()) for end in ends]
    if len(ends) < 2 or not weights[0] & weights[1]:
        yield from ends


def _ends(model: nn.Module) -> list[nn.Module]:
    found = []
    for name in ("get_input_embeddings", "get_output_embeddings"):
        end = getattr(model, name, lambda: None)()
        if isinstance(end, nn.Module):
            found.append(end)
    return found


def shard(
    unit: nn.Module,
    mesh: DeviceMesh,
    half: torch.dtype | None,
    ignored: set[nn.Parameter],
    *,
    gathers_twice: bool,
) -> None:
    """Shard a module's own parameters, those of units within it excepted."""
    left_behind = {
        name: p.quant_state for name, p in unit.named_parameters() if hasattr(p, "quant_state")
    }
    for name in left_behind:
        as_float32(unit.get_parameter(name))
    for parameter in unit.parameters():
        if parameter.requires_grad and parameter.dtype in HALF_DTYPES:
            if left_behind:
                raise ModelError(
                    f"weights in {parameter.dtype} train next to a packed base, and fsdp2 gathers "
                    "both in one dtype",
                    where="lora.adapter_dtype",
                    fix="set it to float32",
                )
            parameter.data = parameter.data.to(torch.float32)
    # The inputs stay as they are: a count of tokens must not be rounded.
    # Packed bytes are not to be rounded: they keep the dtype that they have.
    policy = MixedPrecisionPolicy(
        param_dtype=None if left_behind else half,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    fully_shard(
        unit,
        mesh=mesh,
        mp_policy=policy,
        ignored_params=ignored & set(unit.parameters()) or None,
        reshard_after_forward=gathers_twice,
    )
    for name, state in left_behind.items():
        unit.get_parameter(name).quant_state = state  # type: ignore[attr-defined]


def as_float32(packed: nn.Parameter) -> None:
    """Have the bytes of 4-bit weights be float32, whatever dtype they were stored as.

    Some of them are NaNs if they are taken for half-precision numbers, and a GPU's copy of such
    numbers may write another NaN; one of float32 leaves the bits as they are. As bytes FSDP2 would
    not take them before torch 2.13.
    """
    packed.data = packed.data.view(torch.uint8).flatten().view(torch.float32).reshape(-1, 1)


def give_back(model: nn.Module, *_: Any) -> None:
    """Let go of what was gathered, after a forward pass that no backward pass follows.

    Until then ``model.parameters()`` would be the gathered, rounded weights.
    """
    if not torch.is_grad_enabled():
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()


def require_sharded(model: nn.Module, ignored: set[nn.Parameter]) -> None:
    """Hold the outcome against what was asked for."""
    whole = [
        name
        for name, p in model.named_parameters()
        if not isinstance(p, DTensor) and p not in ignored
    ]
    if whole:
        raise TrainkitError(
            f"{', '.join(whole[:3])}: not sharded, though fsdp2 was asked for",
            where="parallel.shard",
            fix="set parallel: {shard: zero3}, and report this with the model's name",
        )


def gathers_again(model: nn.Module, device: torch.device) -> bool:
    """Whether a model is too large to stay gathered until the backward pass."""
    num_bytes = sum(each.numel() * each.element_size() for each in model.parameters())
    is_gpu = device.type == "cuda"
    memory = torch.cuda.get_device_properties(device).total_memory if is_gpu else 0.0
    return bool(num_bytes > STAYS_WHOLE * memory)


def _trained(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Trained parameters and saved buffers by name; what a frozen base holds is not saved."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name, parameter.detach()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer
