"""The optimizer of a run: the row of its name, its groups, and what holds the gradients.

Muon steps the hidden matrices and AdamW everything else; of GaLore and APOLLO a checkpoint holds
the projections, which are objects, as plain values.
"""

import math
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainingArguments, get_scheduler

from trainkit.errors import ModelError
from trainkit.models.attention.packable import STATE_PARAMETERS
from trainkit.options.optimizers import Optimizer, optimizer_row
from trainkit.parallel.engine import HALF_DTYPES

_KEY, _PLAIN = "projector", "projector_values"


def keep_projections(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Have ``state_dict`` hold no object of a class, so that nothing in a checkpoint can run.

    A projection is made again from its values; its class is that of the package at hand. Of a
    decomposed gradient it keeps the part that it uses, on the GPU and in checkpoints.
    """

    def turned(saved: dict[str, Any], key: str, other: str, turn: Callable[[Any], Any]) -> Any:
        state = {
            number: {
                other if name == key else name: turn(value) if name == key else value
                for name, value in entry.items()
            }
            for number, entry in saved["state"].items()
        }
        return {**saved, "state": state}

    def pack(_: Any, saved: dict[str, Any]) -> Any:
        return turned(saved, _KEY, _PLAIN, lambda value: dict(vars(value)))

    def unpack(loading: torch.optim.Optimizer, saved: dict[str, Any]) -> Any:
        return turned(saved, _PLAIN, _KEY, lambda values: _made(loading, values))

    _cut_projections(sys.modules[type(optimizer).__module__])
    optimizer.register_state_dict_post_hook(pack)
    optimizer.register_load_state_dict_pre_hook(unpack)
    return optimizer


def _cut_projections(module: Any) -> None:
    """Have the package's projections hold ``rank`` rows, where theirs are views of a square matrix.

    Of fp32 gradients, as masters have them, the packages keep a slice of what was decomposed, and
    with it the whole: 49 MiB of a 7B's matrix instead of 1.8.
    """
    plain = getattr(module, "GaLoreProjector", None)
    if plain is None or getattr(plain, "is_cut", False):
        return

    class GaLoreProjector(plain):  # type: ignore[misc, valid-type]
        is_cut = True

        def get_orthogonal_matrix(self, *args: Any, **more: Any) -> Any:
            found = super().get_orthogonal_matrix(*args, **more)
            return [part.clone() for part in found] if isinstance(found, list) else found.clone()

    module.GaLoreProjector = GaLoreProjector


def _made(optimizer: torch.optim.Optimizer, values: dict[str, Any]) -> Any:
    name = "GradientProjector" if "seed" in values else "GaLoreProjector"
    device = optimizer.param_groups[0]["params"][0].device
    made = object.__new__(getattr(sys.modules[type(optimizer).__module__], name))
    for key, value in values.items():
        made.__dict__[key] = value.to(device) if isinstance(value, torch.Tensor) else value
    return made


IS_HIDDEN = "is_hidden"
"""In a group of parameters: these are hidden matrices."""


def hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """Trained weights of linear layers, the output layer excepted: what Muon is made for."""
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    tables = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}  # one may be tied
    if head is not None:
        tables.add(head.weight)
    return {
        parameter
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for name, parameter in module.named_parameters(recurse=False)
        if name == "weight" and parameter.ndim == 2 and parameter.requires_grad
    } - tables


class MuonAdamW(torch.optim.Optimizer):
    """torch's Muon and its fused AdamW, each on its groups, with one state and one learning rate.

    Muon's update is scaled to AdamW's size (``match_rms_adamw``), so that a rate and a weight decay
    mean the same to both.
    """

    def __init__(
        self, groups: list[dict[str, Any]], muon: dict[str, Any], adamw: dict[str, Any]
    ) -> None:
        hidden = [group for group in groups if group[IS_HIDDEN]]
        others = [group for group in groups if not group[IS_HIDDEN]]
        self._muon = torch.optim.Muon(hidden, **muon) if hidden else None
        self._adamw = torch.optim.AdamW(others, **adamw) if others else None
        super().__init__(groups, {})  # in their order; both have added what they know to them

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for part, is_hidden in ((self._muon, True), (self._adamw, False)):
            if part is not None:
                part.state = self.state
                part.param_groups = [g for g in self.param_groups if g[IS_HIDDEN] is is_hidden]
                part.step()
        return loss


# States in pages that host and GPU share stay there when a run is resumed.
#
# bitsandbytes loads them into the GPU's own memory: 15 GiB of it for 8B parameters in 8 bits, of
# a run that was paged because there is no such room.

SMALLEST = 100_000
"""Numbers from which bitsandbytes pages a state."""


def keep_pages(optimizer: Any) -> Any:
    """Have an optimizer of bitsandbytes load states to where it would have made them.

    Nothing changes for an optimizer that is not paged.
    """
    if not optimizer.is_paged:
        return optimizer
    load = optimizer.load_state_dict

    def placed(parameter: torch.Tensor, key: str, value: torch.Tensor) -> torch.Tensor:
        is_state = key.startswith("state") and value.shape == parameter.shape
        if not is_state or value.numel() < SMALLEST:
            return value.to(parameter.device)
        room: torch.Tensor = optimizer.get_state_buffer(parameter, dtype=value.dtype)
        return room.copy_(value)

    def load_into_pages(state_dict: dict[str, Any]) -> None:
        load(state_dict, move_to_device=False)
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[key] = placed(parameter, key, value)

    optimizer.load_state_dict = load_into_pages
    return optimizer


def parameter_groups(
    model: nn.Module,
    *,
    decay_names: set[str],
    weight_decay: float,
    learning_rate: float,
    lora_plus_ratio: float | None,
    saved_lr_ratio: float | None = None,
    part_ratio: Callable[[nn.Parameter], float | None] = lambda _: None,
    options_of: Callable[[nn.Parameter], Mapping[str, Any]] = lambda _: {},
) -> list[dict[str, Any]]:
    """Trained parameters in groups: with and without weight decay, and those with other rates.

    With ``lora_plus_ratio`` LoRA's B matrices learn so many times faster (LoRA+, arXiv:2402.12354),
    with ``saved_lr_ratio`` modules that are saved whole; ``part_ratio`` multiplies either.
    """
    ratios = {".lora_B.": lora_plus_ratio, ".modules_to_save.": saved_lr_ratio}
    groups: dict[tuple[bool, float | None, tuple[Any, ...]], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            ratio = next((ratio for part, ratio in ratios.items() if part in name), None)
            if (of_part := part_ratio(parameter)) is not None:
                ratio = of_part * (1.0 if ratio is None else ratio)
            own = tuple(options_of(parameter).items())
            groups.setdefault((name in decay_names, ratio, own), []).append(parameter)
    return [
        {
            "params": parameters,
            "weight_decay": weight_decay if decays else 0.0,
            **({} if ratio is None else {"lr": learning_rate * ratio}),
            **dict(own),
        }
        for (decays, ratio, own), parameters in groups.items()
    ]


def decayed(model: nn.Module) -> set[str]:
    """The names of the parameters that weight decay shrinks.

    As transformers has it, biases and norms excepted; nor how fast a recurrence forgets, which is
    a logarithm or an offset: zero means nothing for it.
    """
    return {
        name
        for name in Trainer.get_decay_parameter_names(None, model)
        if name.rpartition(".")[2] not in STATE_PARAMETERS
    }


_WIDE = "optim_bits"
"""In a group of bitsandbytes: the precision of its states."""


def averages_gradients(optim: str, in_backward: bool) -> bool:
    """Whether gradients are averaged over processes by the optimizer, and not by DDP."""
    return in_backward or optim == "flat_adamw"


def needs_master_weights(model: nn.Module) -> bool:
    """Whether any trained parameter is kept in half precision."""
    return any(p.requires_grad and p.dtype in HALF_DTYPES for p in model.parameters())


Inner = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def make_optimizer(
    model: nn.Module,
    args: TrainingArguments,
    *,
    lora_plus_ratio: float | None = None,
    saved_lr_ratio: float | None = None,
    part_ratio: Callable[[nn.Parameter], float | None] = lambda _: None,
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
        saved_lr_ratio: likewise.
        part_ratio: likewise.
        in_backward: each parameter steps in the backward pass.
        keeps_masters: half-precision weights have fp32 copies; else they are rounded by chance.
        engine_keeps_masters: DeepSpeed and FSDP2 have fp32 copies of their own.
        num_ranks: processes whose gradients the optimizer averages, where it does.
    """
    row = optimizer_row(args.optim)
    is_half = not engine_keeps_masters and needs_master_weights(model)
    trained = {each.dtype for each in model.parameters() if each.requires_grad}
    if is_half and not args.fp16 and torch.float16 in trained:
        raise ModelError(
            "float16 weights cannot be trained here: there is no loss scaler, so small gradients "
            "would silently become 0",
            where="model.dtype",
            fix="model.dtype: bfloat16 (or float32); on a GPU, model.dtype: float16 with "
            "training.fp16: true keeps fp32 masters and a loss scaler",
        )
    make, options_of = _inner(row, model, args, num_ranks)
    groups = parameter_groups(
        model,
        decay_names=decayed(model),
        weight_decay=args.weight_decay,
        learning_rate=args.learning_rate,
        lora_plus_ratio=lora_plus_ratio,
        saved_lr_ratio=saved_lr_ratio,
        part_ratio=part_ratio,
        options_of=options_of,
    )
    if num_ranks > 1 and averages_gradients(row.name, in_backward):
        for tensor in (*model.parameters(), *model.buffers()):  # as DDP does when it wraps a model
            torch.distributed.broadcast(tensor.data, 0)
    if row.name == "flat_adamw":
        return make(groups)
    if not is_half and not in_backward:
        return make(groups)
    from trainkit.train.masters import Arrivals, MasterWeightOptimizer, RoundedWeightOptimizer

    first = groups[0]["params"][0]
    arrivals = Arrivals(first.device, num_ranks) if in_backward else None
    if is_half and not keeps_masters:
        return RoundedWeightOptimizer(
            groups, make, seed=args.seed, in_pieces=row.elementwise, arrivals=arrivals
        )
    return MasterWeightOptimizer(groups, make, arrivals)


def _inner(
    row: Optimizer, model: nn.Module, args: TrainingArguments, num_ranks: int
) -> tuple[Inner, Callable[[nn.Parameter], Mapping[str, Any]]]:
    """What makes the optimizer of groups, and what it is told of each parameter."""
    betas = (args.adam_beta1, args.adam_beta2)
    if row.name == "muon":
        hidden = hidden_matrices(model)
        muon = {"lr": args.learning_rate, "adjust_lr_fn": "match_rms_adamw"}
        muon |= row.read(args.optim_args)
        adamw = {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon, "fused": True}
        return lambda groups: MuonAdamW(groups, muon, adamw), lambda p: {IS_HIDDEN: p in hidden}
    if row.name == "flat_adamw":
        from trainkit.train.flat import FlatAdamW

        flat = partial(
            FlatAdamW,
            lr=args.learning_rate,
            betas=betas,
            eps=args.adam_epsilon,
            accumulates=args.gradient_accumulation_steps > 1,
            num_ranks=num_ranks,
        )
        return flat, lambda _: {}
    maker, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
    if row.per_rank_bytes is not None:
        _, projected = options.pop("params")
        chosen = set(projected.pop("params"))
        projected = {key: each for key, each in projected.items() if key not in ("betas", "eps")}
        if row.name != "galore_adafactor":
            options |= {"betas": betas, "eps": args.adam_epsilon}
        return (
            lambda groups: keep_projections(maker(groups, **options)),
            lambda p: projected if p in chosen else {},
        )
    package = row.package.module if row.package else ""
    # transformers passes some on as text, and takes every text, False as well, for true
    options |= {k: v for k, v in row.read(args.optim_args).items() if k in options}
    if package == "torchao":
        options["block_size"] = int(options["block_size"])
    if package == "bitsandbytes":
        is_narrow = options.get("optim_bits") == 8
        tables = {m.weight for m in model.modules() if is_narrow and isinstance(m, nn.Embedding)}
        return (
            lambda groups: keep_pages(_with_wide_states(maker(groups, **options))),
            lambda p: {_WIDE: 32} if p in tables else {},
        )
    return lambda groups: maker(groups, **options), lambda _: {}


def _with_wide_states(optimizer: Any) -> Any:
    """Embeddings have fp32 states, as bitsandbytes advises and transformers has it.

    Said in the group: what bitsandbytes remembers by itself it remembers by the address of a
    parameter, for the whole process, and a later parameter may get that address.
    """
    of_all = optimizer.get_config

    def of_group(number: int, place: int, group: dict[str, Any]) -> dict[str, Any]:
        own = {_WIDE: group[_WIDE]} if _WIDE in group else {}
        return {**of_all(number, place, group), **own}

    optimizer.get_config = of_group
    return optimizer


def make_schedule(args: TrainingArguments, optimizer: Any, num_steps: int) -> Any:
    """The schedule of the recipe; ``warmup_power`` bends its warm-up."""
    own: dict[str, Any] = dict(args.lr_scheduler_kwargs or {})
    power, warmup = own.pop("warmup_power", 1), args.get_warmup_steps(num_steps)
    name = args.lr_scheduler_type
    for key, value in own.items():
        if isinstance(value, int | float) and not 0 <= value < math.inf:
            raise ValueError(f"{key} is {value}, and must be a number from 0 on")
        if key in ("num_cycles", "num_decay_steps") and float(value) > num_steps:
            raise ValueError(f"{key} is {value}, and the run has {num_steps} steps")
    schedule: Any = get_scheduler(name, optimizer, warmup, num_steps, own or None)
    if power != 1:
        if not isinstance(schedule, LambdaLR) or not isinstance(power, int | float) or power <= 0:
            raise ValueError("warmup_power is a number above 0, for schedules that warm up")
        shapes: Any = schedule.lr_lambdas
        schedule.lr_lambdas = [partial(_bent, each, power, warmup) for each in shapes]
    if isinstance(schedule, LambdaLR):
        _refuse_odd(schedule.lr_lambdas[0], num_steps)
    return schedule


def _refuse_odd(shape: Callable[[int], float], num_steps: int) -> None:
    """Refuse rates below 0 or above the recipe's, and a course that is near 0 most of the time."""
    rates = {step: shape(step) for step in range(0, num_steps, max(num_steps // 1000, 1))}
    for step, rate in rates.items():
        if not -1e-6 <= rate <= 1 + 1e-6:
            raise ValueError(f"the rate of step {step + 1} would be {rate:.4g} times learning_rate")
    if 2 * sum(rate < 1e-3 for rate in rates.values()) > len(rates) + 1:
        raise ValueError("at most steps it would be less than a thousandth of learning_rate")


def _bent(shape: Callable[[int], float], power: float, warmup: int, step: int) -> float:
    return shape(step) ** power if step < warmup else shape(step)
