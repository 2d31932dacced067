"""Pipeline parallelism: each rank holds some of the layers; with DDP or FSDP2 between pipelines.

Ranks that hold the same layers (the data ranks) add their gradients up once a step, after the last
micro-batch; under FSDP2 they hold a part of each weight, and do so in every backward pass. A tied
head lives on the first and on the last stage; both add up its gradients and make the same update.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from peft.utils import SAFETENSORS_WEIGHTS_NAME as ADAPTER_NAME
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers.utils import SAFE_WEIGHTS_NAME

from trainkit.auto_class import text_alone
from trainkit.errors import CheckpointError, ModelError
from trainkit.options.data import IGNORE_INDEX
from trainkit.options.parallel import ParallelOptions
from trainkit.parallel.engine import Batch, LoadPart, Saving, Training, autocast_of
from trainkit.parallel.fsdp import (
    InParts,
    compute_dtype,
    gathers_again,
    give_back,
    kept_whole,
    require_sharded,
    save_config,
    shard,
)
from trainkit.parallel.parameters import own_part
from trainkit.parallel.pipeline.chain import (
    Chain,
    RunLoss,
    Stage,
    causal_lm,
    cut_away,
    find_chain,
    loading_class,
    whole_skeleton,
)
from trainkit.parallel.pipeline.schedule import Runnable, Steps, Wire, relay
from trainkit.parallel.pipeline.share import SCHEDULES, Share, refuse_micro_batches
from trainkit.parallel.process import ProcessRank
from trainkit.places import WEIGHTS


def shard_over(
    model: nn.Module, share: Share, chain: Chain, mesh: DeviceMesh, device: torch.device
) -> dict[str, torch.dtype]:
    """Shard what a rank has of a model, in place, over the ranks that have the same."""
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    half = compute_dtype(model)
    ignored = kept_whole(model, half)
    again = gathers_again(model, device)
    for unit in _units(causal_lm(model), share, chain):
        shard(unit, mesh, half, ignored, gathers_twice=again)
    base = causal_lm(model)
    if base.config.tie_word_embeddings and (share.has_first or share.has_last):
        ends = base.get_submodule(chain.embedding), base.get_submodule(chain.head)
        run, other = ends if share.has_first else reversed(ends)
        other.weight = run.weight
    require_sharded(model, ignored)
    return dtypes


def _units(base: Any, share: Share, chain: Chain) -> Iterator[nn.Module]:
    """What is gathered at a time: each layer, and what this rank runs of the ends."""
    layers = base.get_submodule(chain.layers)
    yield from (layers[number] for number in sorted(share.layers))
    ends = [*(chain.before if share.has_first else ()), *(chain.after if share.has_last else ())]
    yield from map(base.get_submodule, ends)


def whole(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """All of a tensor in the dtype that it is saved in; all ranks that have parts call it."""
    if not isinstance(tensor, DTensor):
        return tensor
    converted = tensor.to(dtype)
    assert isinstance(converted, DTensor)
    return converted.full_tensor()


def write_shards(
    weights: Mapping[str, torch.Tensor] | None, folder: Path, *, group: Any, rank: int, size: int
) -> None:
    """Write this rank's file, and the index of all; every rank of a group calls it."""
    name = f"model-{rank + 1:05d}-of-{size:05d}.safetensors"
    part: dict[str, Any] = {"names": [], "bytes": 0, "numbers": 0, "problem": None}
    if weights is not None:
        try:
            plain = {key: value.detach().cpu().contiguous() for key, value in weights.items()}
            save_file(plain, folder / name, metadata={"format": "pt"})
        except Exception as error:  # the others must hear of it, whatever it is
            part["problem"] = f"rank {rank} of the pipeline: {type(error).__name__}: {error}"
        part["names"] = sorted(weights)
        part["bytes"] = sum(value.numel() * value.element_size() for value in weights.values())
        part["numbers"] = sum(value.numel() for value in weights.values())
    parts: list[Any] = [None] * size
    torch.distributed.all_gather_object(parts, part, group=group)
    problems = [each["problem"] for each in parts if each["problem"] is not None]
    if problems:
        raise CheckpointError(problems[0], where=str(folder))
    if weights is not None and rank == 0:
        files = {
            key: f"model-{number + 1:05d}-of-{size:05d}.safetensors"
            for number, each in enumerate(parts)
            for key in each["names"]
        }
        metadata = {
            "total_parameters": sum(each["numbers"] for each in parts),
            "total_size": sum(each["bytes"] for each in parts),
        }
        index = {"metadata": metadata, "weight_map": dict(sorted(files.items()))}
        (folder / WEIGHTS[1]).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


_BUCKET = 1 << 26
"""Numbers that are added up over ranks at once."""


def gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    """Zeros where a step has left none: the ranks add up together."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _buckets(gradients: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Gradients of one dtype, about `_BUCKET` numbers at a time."""
    for dtype in dict.fromkeys(each.dtype for each in gradients):
        bucket: list[torch.Tensor] = []
        for each in gradients:
            if each.dtype != dtype:
                continue
            bucket.append(each)
            if sum(one.numel() for one in bucket) >= _BUCKET:
                yield bucket
                bucket = []
        if bucket:
            yield bucket


FSDP2 = "fsdp2"


@dataclass(frozen=True)
class _Placed:
    """What there is once the model is spread."""

    share: Share
    stages: Sequence[Stage]
    ranks: Sequence[int]
    wire: Wire
    steps: Steps
    data_group: Any
    data_size: int
    tied_group: Any
    tied: tuple[nn.Parameter, ...]
    """The head that is the embeddings, where another rank has it, too."""


class Pipeline(InParts):
    """Layers on several ranks."""

    def __init__(self, options: ParallelOptions, process: ProcessRank) -> None:
        super().__init__()
        self._options, self._process = options, process
        self.keeps_masters = options.shard == FSDP2
        self._rank = process.dist_rank // (process.world_size // options.pipeline)
        self._placed: _Placed | None = None
        self._found: Chain | None = None
        self.load_part: LoadPart = self._load_part

    # -- before there is a model ------------------------------------------------------------------

    def refuse_contradictions(self, training: Mapping[str, Any], *, world_size: int) -> None:
        """Refuse a step of micro-batches that the schedule cannot deal with."""
        del world_size
        refuse_micro_batches(self._options, int(training["gradient_accumulation_steps"]))

    def refuse_model(self, config: Any, replica_of: Callable[[Any], Any]) -> None:
        """Refuse a model with too few layers, or that is no chain of them, see `find_chain`."""
        Share.of(self._options, 0, config.get_text_config().num_hidden_layers)
        self._found = find_chain(text_alone(config), replica_of)  # a tower is no part of it

    @property
    def _chain(self) -> Chain:
        assert self._found is not None, "the model is refused, or not, before it is loaded"
        return self._found

    def _load_part(
        self, model_class: type, config: Any, load: Callable[[type], tuple[Any, Any]]
    ) -> tuple[Any, Any]:
        """Read this rank's weights only; the rest of the model is on the meta device."""
        model, report = load(loading_class(model_class, self._share(config), self._chain))
        return whole_skeleton(model, model_class, self._chain), report

    def receive(self, model: nn.Module, args: Any) -> None:
        """Cut away what other ranks hold; the rest goes to the device."""
        base, chain = causal_lm(model), self._chain
        ends = [base.get_submodule(path) for path in (*chain.before, *chain.after)]
        is_adapted = base is not model
        if is_adapted and any(p.requires_grad for end in ends for p in end.parameters()):
            raise ModelError(
                "adapters on the embeddings or the head are saved with both ends of the model, "
                "which are on different ranks",
                where="lora.target_modules",
                fix="leave embeddings and head out, or set parallel: {shard: fsdp2}",
            )
        share = self._share(base.config)
        cut_away(model, share, chain)
        layers = base.get_submodule(chain.layers)
        firsts = [layers[number] for number in share.stages.get(0, ())]
        firsts += [base.get_submodule(path) for path in chain.before]
        trains_first = any(p.requires_grad for each in firsts for p in each.parameters())
        if not any(parameter.requires_grad for parameter in model.parameters()) or (
            share.has_first and not trains_first
        ):
            raise ModelError(
                f"a stage on rank {self._rank} of the pipeline trains nothing, and torch's "
                "schedules want a gradient of each",
                where="parallel.pipeline",
                fix="train layers of every stage, or set a smaller parallel.pipeline",
            )
        super().receive(model, args)

    def _share(self, config: Any) -> Share:
        text = config.get_text_config()
        head = self._chain.head_in_layers(text.vocab_size)
        return Share.of(self._options, self._rank, text.num_hidden_layers, head)

    # -- the model --------------------------------------------------------------------------------

    def place(self, model: nn.Module, device: torch.device) -> None:
        """Make stages of a model that has been cut; every rank calls it."""
        size = self._options.pipeline
        data_size = self._process.world_size // size
        mesh = init_device_mesh(device.type, (size, data_size), mesh_dim_names=("pipeline", "data"))
        config = causal_lm(model).config
        share = self._share(config)
        data_rank = self._process.dist_rank % data_size
        ranks = [stage * data_size + data_rank for stage in range(size)]
        tied: tuple[nn.Parameter, ...] = ()
        tied_group = None
        if config.tie_word_embeddings and share.last_rank != 0:
            for data in range(data_size):
                pair = [data, share.last_rank * data_size + data]
                group = torch.distributed.new_group(pair)
                tied_group = group if data == data_rank else tied_group
            if share.has_first or share.has_last:
                tied = (self._embedding(model).weight,)
        # What goes from layer to layer has the dtype of the base's weights.
        layers = causal_lm(model).get_submodule(self._chain.layers)
        weights = (p for name, p in layers.named_parameters() if "lora_" not in name)
        dtype = next(each.dtype for each in weights if each.is_floating_point())
        wire = Wire(
            mesh["pipeline"].get_group(),
            ranks[share.last_rank],
            device,
            self._chain.hidden_size,
            dtype,
        )
        if self._options.shard == FSDP2:
            self._saved_dtypes = shard_over(model, share, self._chain, mesh["data"], device)
            if tied:
                tied = (self._embedding(model).weight,)
        autocast = autocast_of(self.args)
        stages = [Stage(model, index, share, autocast, self._chain) for index in share.stages]
        row = SCHEDULES[self._options.schedule]
        self._placed = _Placed(
            share,
            stages,
            ranks,
            wire,
            Steps(stages, share, row, wire),
            mesh["data"].get_group(),
            data_size,
            tied_group,
            tied,
        )

    def _embedding(self, model: nn.Module) -> Any:
        return causal_lm(model).get_submodule(self._chain.embedding)

    @property
    def _now(self) -> _Placed:
        assert self._placed is not None, "the optimizer is made after the stages"
        return self._placed

    def set_up(self, training: Training) -> nn.Module:
        self._hold(training)
        model: nn.Module = training.model
        return model

    def forget(self) -> None:
        super().forget()
        self._placed = None

    def _holders(self) -> dict[nn.Parameter, nn.Parameter]:
        """Each trained parameter with what has its gradient: itself, or its fp32 master."""
        masters: dict[Any, Any] = (
            {} if self._holder is None else self._holder.gather_gradients().masters
        )
        trained = [each for each in self.model.parameters() if each.requires_grad]
        return {each: masters.get(each, each) for each in trained}

    def forward_backward(
        self,
        batches: Iterable[Batch],
        count: int,
        loss: Callable[[Any, Batch], torch.Tensor],
        watch: Callable[[torch.Tensor], torch.Tensor | None],
    ) -> list[torch.Tensor]:
        given = list(batches)
        # The end of an epoch has fewer; the schedule wants as many as ever.
        missing = self.args.gradient_accumulation_steps - count
        padded = [*given, *[without_labels(given[-1])] * missing]
        for stage in self._now.stages:
            stage.train(self.model.training)
        losses = self._now.steps.run(padded, loss, self._holders)[:count]
        holders = self._holders()
        self._finish_gradients(holders)
        for each in losses:
            factor = watch(each)
            if factor is not None:  # the gradients are there already
                for holder in list(holders.values())[:1]:
                    holder.grad = None if holder.grad is None else holder.grad * factor
        return [losses.sum()]

    def evaluate(self, batch: Batch, measure: Callable[[Any, Batch], Any]) -> Any:
        """On the rank with the head; None elsewhere."""
        return self._forward(self.model, batch, measure)

    def _forward(self, model: nn.Module, batch: Mapping[str, Any], last: RunLoss) -> Any:
        now = self._now
        for stage in now.stages:
            stage.train(model.training)
        found = relay(now.stages, now.share, now.ranks, now.wire, batch, last)
        with torch.no_grad():
            give_back(model)
        return found

    def runnable(self, model: nn.Module) -> nn.Module:
        """The model as something that all ranks can call together for logits."""

        def run(batch: Mapping[str, Any], last: RunLoss) -> Any:
            return self._forward(model, batch, last)

        return Runnable(model, run, self._now.share, self._now.wire)

    @torch.no_grad()
    def _finish_gradients(self, holders: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Add up what several ranks have of a gradient, and take the mean over the data ranks."""
        now = self._now
        for parameter in now.tied:
            if parameter in holders:
                mine = own_part(gradient_of(holders[parameter]))
                torch.distributed.all_reduce(mine, group=now.tied_group)
        if now.data_size == 1 or self._options.shard == FSDP2:
            return
        gradients = [gradient_of(each) for each in holders.values()]
        for bucket in _buckets(gradients):
            flat = torch.cat([each.flatten() for each in bucket])
            torch.distributed.all_reduce(flat, group=now.data_group)
            flat.div_(now.data_size)
            pieces = flat.split([each.numel() for each in bucket])
            for each, piece in zip(bucket, pieces, strict=True):
                each.copy_(piece.view_as(each))

    @torch.no_grad()
    def _clipped(self, max_norm: float) -> torch.Tensor:
        now, holders = self._now, self._holders()
        repeated = () if now.share.has_first else now.tied
        counted = [
            holder.grad
            for parameter, holder in holders.items()
            if holder.grad is not None and not any(parameter is each for each in repeated)
        ]
        mine = torch.nn.utils.get_total_norm([own_part(each) for each in counted])
        square = mine.to(now.wire.device).double() ** 2
        torch.distributed.all_reduce(square, group=now.wire.group)
        if self._options.shard == FSDP2:
            torch.distributed.all_reduce(square, group=now.data_group)
        norm = square.sqrt().float()
        gradients = [own_part(each.grad) for each in holders.values() if each.grad is not None]
        if max_norm < float("inf") and gradients:
            torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def figures(self) -> Mapping[str, float]:
        """The share of the steps in which the mean rank waits for others."""
        steps = self._now.steps
        seconds = torch.tensor((steps.busy.take(), steps.whole.take()), device=self.args.device)
        busy, whole = self.ranks.reduce(seconds).tolist()
        return {"pipeline_bubble": max(1 - busy / whole, 0.0)} if whole else {}

    # -- files ------------------------------------------------------------------------------------

    def save_weights(self, save: Saving, write: Callable[[Mapping[str, Any]], None]) -> None:
        """Each rank's weights next to the others', or all adapters; and the configuration."""
        folder, keep = save.directory, bool(self.args.should_save)
        folder.mkdir(parents=True, exist_ok=True)
        if keep:
            save.attempt(partial(write, {}))  # what it would write itself are parts
        if isinstance(self.model, PeftModel):
            # peft looks for adapters in the modules that this rank has.
            adapters = self._gather(get_peft_model_state_dict(self.model))
            if keep:
                about = {"format": "pt"}
                save.attempt(partial(save_file, adapters, folder / ADAPTER_NAME, metadata=about))
            return
        if keep:
            (folder / SAFE_WEIGHTS_NAME).unlink(missing_ok=True)  # holds nothing
            save.attempt(partial(save_config, self, self.model, folder))
        self._write_weights(self.model, folder)

    def _gather(self, mine: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Small weights of all ranks by name, on the first one; nothing on the others."""
        now = self._now
        held = {name: whole(value.detach(), value.dtype).cpu() for name, value in mine.items()}
        if self._process.dist_rank % now.data_size:
            return {}
        parts: list[Any] | None = [None] * len(now.ranks) if self._rank == 0 else None
        torch.distributed.gather_object(held, parts, dst=now.ranks[0], group=now.wire.group)
        return {name: value for each in parts or () for name, value in each.items()}

    def _write_weights(self, model: nn.Module, folder: Path) -> None:
        """Write this rank's part of the model, next to the others'; no rank gathers all of it."""
        now = self._now
        torch.distributed.barrier()
        writes = self._process.dist_rank % now.data_size == 0
        own: dict[str, torch.Tensor] = {}
        for name, value in self._own(model):
            saved = whole(value, self._saved_dtypes.get(name, value.dtype))
            own |= {name: saved.cpu()} if writes else {}
        write_shards(
            own if writes else None,
            folder,
            group=now.wire.group,
            rank=self._rank,
            size=len(now.ranks),
        )

    def _own(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """What ``state_dict`` has of this rank's share, each tensor once."""
        tied = () if self._now.share.has_first else self._now.tied
        seen = {own_part(each).data_ptr() for each in tied}
        for name, value in model.state_dict().items():
            if own_part(value).data_ptr() not in seen:
                seen.add(own_part(value).data_ptr())
                yield name, value

    def _parts(self, *, of_optimizer: bool = True) -> dict[str, torch.Tensor]:
        masters = getattr(self.optimizer, "masters", {}) if of_optimizer else {}
        return {
            name: masters.get(parameter, parameter).detach().float()
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }

    @torch.no_grad()
    def _round(self, weights: Mapping[str, torch.Tensor]) -> None:
        for name, value in weights.items():
            parameter = self.model.get_parameter(name)
            if own_part(parameter).data_ptr() != own_part(value).data_ptr():
                parameter.copy_(value)


def without_labels(batch: Batch) -> Batch:
    labels = torch.full_like(batch["labels"], IGNORE_INDEX)
    return {**batch, "labels": labels, "num_trained_tokens": 0}
