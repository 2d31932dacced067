"""The optimizer of a run: the row of its name, its groups, and what holds the gradients."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from trainkit.options.optimizers import Optimizer, optimizer_row
from trainkit.train.optimizer.arrival import Arrivals
from trainkit.train.optimizer.flat import make_flat_adamw
from trainkit.train.optimizer.groups import parameter_groups
from trainkit.train.optimizer.muon import IS_HIDDEN, hidden_matrices, make_muon
from trainkit.train.optimizer.optim import MasterWeightOptimizer, needs_master_weights
from trainkit.train.optimizer.paged import keep_pages
from trainkit.train.optimizer.projected import keep_projections
from trainkit.train.optimizer.rounding import RoundedWeightOptimizer

_WIDE = "optim_bits"
"""In a group of bitsandbytes: the precision of its states."""


def averages_gradients(optim: str, in_backward: bool) -> bool:
    """Whether gradients are averaged over processes by the optimizer, and not by DDP."""
    return in_backward or optim == "flat_adamw"


Inner = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def make_optimizer(
    model: nn.Module,
    args: TrainingArguments,
    *,
    lora_plus_ratio: float | None = None,
    in_backward: bool = False,
    keeps_masters: bool = True,
    engine_keeps_masters: bool,
    num_ranks: int = 1,
) -> torch.optim.Optimizer:
    """The optimizer that ``training.optim`` names.

    Args:
        model: adapters attached, on its device.
        args: what transformers reads.
        lora_plus_ratio: see `parameter_groups`.
        in_backward: each parameter steps in the backward pass.
        keeps_masters: half-precision weights have fp32 copies; else they are rounded by chance.
        engine_keeps_masters: DeepSpeed and FSDP2 have fp32 copies of their own.
        num_ranks: processes whose gradients the optimizer averages, where it does.
    """
    row = optimizer_row(args.optim)
    make, options_of = _inner(row, model, args, num_ranks)
    groups = parameter_groups(
        model,
        decay_names=set(Trainer.get_decay_parameter_names(None, model)),
        weight_decay=args.weight_decay,
        learning_rate=args.learning_rate,
        lora_plus_ratio=lora_plus_ratio,
        options_of=options_of,
    )
    if num_ranks > 1 and averages_gradients(row.name, in_backward):
        _take_weights_of_first_rank(model)
    if row.name == "flat_adamw":
        return make(groups)
    is_half = not engine_keeps_masters and needs_master_weights(model)
    arrivals = None
    if in_backward:
        arrivals = Arrivals(groups[0]["params"][0].device, num_ranks)
    if is_half and not keeps_masters:
        return RoundedWeightOptimizer(
            groups, make, seed=args.seed, in_pieces=row.elementwise, arrivals=arrivals
        )
    if is_half or in_backward:
        return MasterWeightOptimizer(groups, make, arrivals)
    return make(groups)


def _inner(
    row: Optimizer, model: nn.Module, args: TrainingArguments, num_ranks: int
) -> tuple[Inner, Callable[[nn.Parameter], Mapping[str, Any]]]:
    """What makes the optimizer of groups, and what it is told of each parameter."""
    if row.name == "muon":
        hidden = hidden_matrices(model)
        return lambda groups: make_muon(groups, args), lambda p: {IS_HIDDEN: p in hidden}
    if row.name == "flat_adamw":
        return lambda groups: make_flat_adamw(groups, args, num_ranks), lambda _: {}
    maker, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
    if row.per_rank_bytes is not None:
        _, projected = options.pop("params")
        chosen = set(projected.pop("params"))
        for name, value in (
            ("betas", (args.adam_beta1, args.adam_beta2)), ("eps", args.adam_epsilon),
        ):  # fmt: skip
            projected.pop(name, None)
            if row.name != "galore_adafactor":
                options[name] = value
        return (
            lambda groups: keep_projections(maker(groups, **options)),
            lambda p: projected if p in chosen else {},
        )
    package = row.package.module if row.package else ""
    # transformers passes some on as text, and takes every text, False as well, for true
    options |= {k: v for k, v in row.read(args.optim_args).items() if k in options}
    if package == "torchao":
        options["block_size"] = int(options["block_size"])
    if package == "bitsandbytes" and options.get("optim_bits") == 8:
        tables = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
        return (
            lambda groups: keep_pages(_with_wide_states(maker(groups, **options))),
            lambda p: {_WIDE: 32} if p in tables else {},
        )
    if package == "bitsandbytes":
        return lambda groups: keep_pages(maker(groups, **options)), lambda _: {}
    return lambda groups: maker(groups, **options), lambda _: {}


def _with_wide_states(optimizer: Any) -> torch.optim.Optimizer:
    """Embeddings have fp32 states, as bitsandbytes advises and transformers has it.

    Said in the group: what bitsandbytes remembers by itself it remembers by the address of a
    parameter, for the whole process, and a later parameter may get that address.
    """
    of_all = optimizer.get_config

    def of_group(number: int, place: int, group: dict[str, Any]) -> dict[str, Any]:
        own = {_WIDE: group[_WIDE]} if _WIDE in group else {}
        return {**of_all(number, place, group), **own}

    optimizer.get_config = of_group
    made: torch.optim.Optimizer = optimizer
    return made


@torch.no_grad()
def _take_weights_of_first_rank(model: nn.Module) -> None:
    """As DDP does when it wraps a model."""
    for tensor in (*model.parameters(), *model.buffers()):
        torch.distributed.broadcast(tensor.data, 0)
