"""``optim: flat_adamw``: weights, gradients and states each in one buffer, a step in one pass.

Parameters are views of the buffers. Clipping costs one more read of the gradients: the factor stays
on the device, and the pass that updates the weights multiplies by it and clears the gradients, too.
Over several processes the gradients are averaged by one all-reduce, without DDP.

Bytes per trained bfloat16 weight: 2 for itself, 4 for the fp32 master, 8 for the moments, and 2 for
the gradient, or 4 where micro-batches are summed: 16 or 18.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trainkit.errors import ModelError
from trainkit.kernels.adamw.function import adamw_, square_sum
from trainkit.parallel.engine import HALF_DTYPES
from trainkit.train.masters import on_gradient

_KEY = "training.optim"
_OF_TORCH = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": True,
    "decoupled_weight_decay": True,
}
"""What ``torch.optim.AdamW`` has in its groups, and looks for in a saved state."""

_ALIGNED = 64
"""Every parameter begins at a multiple of so many numbers: 256 bytes in fp32."""


@dataclass
class _Bucket:
    """The parameters of a group that have one dtype, one behind the other.

    Attributes:
        weight: (N,) fp32: the weights, or the masters of half-precision ones.
        half: (N,) half-precision weights, or None.
        gradient: (N,), part of a larger buffer.
        gradients: each parameter's view of it. Views are made once: making those of 400 tensors
            takes longer than their update.
        places: where each parameter's weights are, as ``data_ptr`` says it.
        step: 0-d: updates so far; on the device, which alone knows of a step that it held back.
    """

    group: int
    parameters: list[nn.Parameter]
    starts: list[int]
    weight: torch.Tensor
    half: torch.Tensor | None
    gradient: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    step: torch.Tensor
    gradients: list[torch.Tensor] = field(init=False)
    places: list[int] = field(init=False)

    def __post_init__(self) -> None:
        kept = self.weight if self.half is None else self.half
        self.gradients = [view for _, view in self.views(self.gradient)]
        self.places = [view.data_ptr() for _, view in self.views(kept)]

    def views(self, buffer: torch.Tensor) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        for parameter, start in zip(self.parameters, self.starts, strict=True):
            yield parameter, buffer[start : start + parameter.numel()].view(parameter.shape)


class FlatAdamW(torch.optim.Optimizer):
    """AdamW with decoupled decay; its ``state_dict`` is that of ``torch.optim.AdamW``.

    Of half-precision weights it keeps fp32 masters, and its ``state_dict`` has them as
    `MasterWeightOptimizer` does, so that either goes on with the other's state.

    ``accumulates``: a step has several micro-batches, so half-precision gradients are summed in
    fp32. ``num_ranks`` processes' gradients are averaged here.
    """

    _step_supports_amp_scaling = True  # ``found_inf`` holds a step back on the device

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        accumulates: bool = False,
        num_ranks: int = 1,
    ) -> None:
        super().__init__(
            groups, {**_OF_TORCH, "lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0}
        )
        self._num_ranks = num_ranks
        self._has_gathered = False
        self._is_clear = True
        self.found_inf: torch.Tensor | None = None
        self.grad_scale: torch.Tensor | None = None
        self._gradients: dict[torch.dtype, torch.Tensor] = {}
        self._buckets: list[_Bucket] = []
        self._lay_out(accumulates)
        self._unseen: set[nn.Parameter] = set(self.parameters())
        self._hooks = [on_gradient(parameter, self._see) for parameter in self._unseen]
        device = next(self.parameters()).device
        self._factor = torch.ones((), device=device)
        self._taken = torch.zeros((), device=device)

    def _see(self, parameter: torch.Tensor) -> None:
        self._unseen.discard(parameter)

    def parameters(self) -> Iterator[nn.Parameter]:
        for group in self.param_groups:
            yield from group["params"]

    # -- buffers --------------------------------------------------------------------------------

    @torch.no_grad()
    def _lay_out(self, accumulates: bool) -> None:
        """Move the weights into buffers, and make room for the rest."""
        kinds: dict[tuple[int, torch.dtype], list[nn.Parameter]] = {}
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                kinds.setdefault((number, parameter.dtype), []).append(parameter)
        laid = [(kind, parameters, *_starts(parameters)) for kind, parameters in kinds.items()]
        ends: dict[torch.dtype, int] = {}
        for (_, dtype), _, _, size in laid:
            summed = _summed_in(dtype, accumulates)
            ends[summed] = ends.get(summed, 0) + size
        device = laid[0][1][0].device
        self._gradients = {
            dtype: torch.zeros(size, dtype=dtype, device=device) for dtype, size in ends.items()
        }
        used = dict.fromkeys(ends, 0)
        for (number, dtype), parameters, starts, size in laid:
            summed = _summed_in(dtype, accumulates)
            weights = torch.zeros(size, dtype=dtype, device=device)
            half = weights if dtype in HALF_DTYPES else None
            bucket = _Bucket(
                number,
                parameters,
                starts,
                weight=weights,
                half=half,
                gradient=self._gradients[summed][used[summed] : used[summed] + size],
                exp_avg=torch.zeros(size, device=device),
                exp_avg_sq=torch.zeros(size, device=device),
                step=torch.zeros((), device=device),
            )
            used[summed] += size
            for parameter, view in bucket.views(weights):
                parameter.data = view.copy_(parameter)
                if summed is not dtype:
                    parameter.grad_dtype = summed
            if half is not None:
                bucket.weight = half.to(torch.float32)
            self._buckets.append(bucket)
            first, second = (dict(bucket.views(b)) for b in (bucket.exp_avg, bucket.exp_avg_sq))
            for parameter in parameters:
                self.state[parameter] = {
                    "step": bucket.step,
                    "exp_avg": first[parameter],
                    "exp_avg_sq": second[parameter],
                }

    @torch.no_grad()
    def begin_micro_batch(self, model: nn.Module, *, accumulates: bool) -> None:
        """Have the backward pass add to the buffers: to clear gradients let go of them."""
        del model, accumulates
        self._attach()
        self._is_clear = False

    def _attach(self) -> None:
        for bucket in self._buckets:
            for parameter, view in zip(bucket.parameters, bucket.gradients, strict=True):
                gradient = parameter.grad
                if gradient is view:
                    continue
                if gradient is not None and gradient.data_ptr() != view.data_ptr():
                    view.add_(gradient)  # somebody has put another in place
                parameter.grad = view

    # -- a step ---------------------------------------------------------------------------------

    @torch.no_grad()
    def gather_gradients(self) -> "FlatAdamW":
        """Average the gradients over the ranks, once a step, after its last micro-batch."""
        if self._has_gathered:
            return self
        self._has_gathered = True
        self._attach()
        self._check()
        if self._num_ranks > 1:
            for buffer in self._gradients.values():
                torch.distributed.all_reduce(buffer.div_(self._num_ranks))
        return self

    def _check(self) -> None:
        fix = "set training.optim: adamw_torch_fused, or leave them untrained"
        if self._hooks and self._unseen:
            count = f"{len(self._unseen)} of the trained parameters get no gradient"
            raise ModelError(
                f"{count}, and flat_adamw steps all of them together", where=_KEY, fix=fix
            )
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for bucket in self._buckets:
            for parameter, place in zip(bucket.parameters, bucket.places, strict=True):
                if parameter.data_ptr() != place:
                    raise ModelError(
                        "a parameter was moved out of the buffer that flat_adamw steps",
                        where=_KEY,
                        fix="set training.optim: adamw_torch_fused",
                    )

    @torch.no_grad()
    def clip(self, max_norm: float) -> torch.Tensor:
        """Have the next step clip to a norm.

        ``inf`` clips nothing.
        """
        self.gather_gradients()
        norm = torch.stack([square_sum(buffer) for buffer in self._gradients.values()]).sum().sqrt()
        self._factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Clip, update, round and clear, in one pass for each group."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.gather_gradients()
        held = self._taken if self.found_inf is None else self.found_inf
        for bucket in self._buckets:
            group = self.param_groups[bucket.group]
            adamw_(
                bucket.weight,
                bucket.gradient,
                bucket.exp_avg,
                bucket.exp_avg_sq,
                self._factor,
                held,
                bucket.step,
                bucket.half,
                lr=float(group["lr"]),
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
            )
            bucket.step += (held == 0).to(bucket.step.dtype)
        self.found_inf = None
        self._factor = torch.ones_like(self._factor)
        self._has_gathered, self._is_clear = False, True
        return loss

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear what the buffers hold; the parameters keep their views of them."""
        del set_to_none  # a gradient outside the buffer would be one that no step sees
        if not self._is_clear:
            for buffer in self._gradients.values():
                buffer.zero_()
        self._is_clear, self._has_gathered = True, False
        for bucket in self._buckets:
            for parameter, view in zip(bucket.parameters, bucket.gradients, strict=True):
                if parameter.grad is not view:
                    parameter.grad = view

    # -- checkpoints ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """torch's, and the fp32 masters."""
        saved = super().state_dict()
        # All parameters of a bucket share one count, and torch would count it up for each of them.
        saved["state"] = {
            number: {**entry, "step": entry["step"].clone()}
            for number, entry in saved["state"].items()
        }
        masters = self._masters()
        return {**saved, "masters": list(masters.values())} if masters else saved

    def _masters(self) -> dict[nn.Parameter, torch.Tensor]:
        """The fp32 copies of half-precision parameters, in the order of the groups."""
        views = {
            parameter: view
            for bucket in self._buckets
            if bucket.half is not None
            for parameter, view in bucket.views(bucket.weight)
        }
        return {each: views[each] for each in self.parameters() if each in views}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore both; also what ``torch.optim.AdamW`` has saved."""
        groups = state_dict["param_groups"]
        sizes = [[len(each["params"]) for each in some] for some in (groups, self.param_groups)]
        masters, copies = self._masters(), state_dict.get("masters", [])
        fit = [copy.shape for copy in copies] in ([], [each.shape for each in masters.values()])
        if sizes[0] != sizes[1] or not fit:
            raise ValueError("the optimizer state belongs to a model with other trained weights")
        numbers = [number for group in groups for number in group["params"]]
        entries = dict(zip(self.parameters(), map(state_dict["state"].get, numbers), strict=True))
        for bucket in self._buckets:
            own = [entries[parameter] for parameter in bucket.parameters]
            steps = {0 if entry is None else int(entry["step"]) for entry in own}
            if len(steps) > 1:
                raise ValueError("flat_adamw steps all parameters together, and these have not")
            bucket.step.fill_(steps.pop())
            for parameter, entry in zip(bucket.parameters, own, strict=True):
                for key in ("exp_avg", "exp_avg_sq"):
                    moment = self.state[parameter][key]
                    moment.zero_() if entry is None else moment.copy_(entry[key])
        for group, saved in zip(self.param_groups, groups, strict=True):
            known = {key: saved[key] for key in (*group, "initial_lr") if key in saved}
            group.update(known, params=group["params"])
        for master, copy in zip(masters.values(), copies, strict=False):
            master.copy_(copy)


def _starts(parameters: list[nn.Parameter]) -> tuple[list[int], int]:
    starts, end = [], 0
    for parameter in parameters:
        starts.append(end)
        end += -(-parameter.numel() // _ALIGNED) * _ALIGNED
    return starts, end


def _summed_in(dtype: torch.dtype, accumulates: bool) -> torch.dtype:
    """What gradients of weights of a dtype are summed in."""
    return torch.float32 if accumulates and dtype in HALF_DTYPES else dtype
