"""The optimizer: fp32 master weights for models trained in half precision, and LoRA+ groups.

A bfloat16 weight near 1 has neighbours 2**-8 away, so an update of 1e-5 rounds to nothing.
DeepSpeed keeps an fp32 copy of such weights; without it, :class:`MasterWeightOptimizer` does.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

HALF_DTYPES = (torch.bfloat16, torch.float16)


class MasterWeightOptimizer(torch.optim.Optimizer):
    """Runs any torch optimizer on fp32 copies of half-precision parameters.

    Parameters that are fp32 already are handed to the inner optimizer as they are. The copies live
    in the optimizer's state, so a checkpoint holds them and a resumed run continues exactly.

    Args:
        param_groups: dictionaries with ``params`` and options, as torch optimizers take them.
        make_inner: builds the inner optimizer from groups of fp32 parameters.
    """

    def __init__(
        self,
        param_groups: Iterable[dict[str, Any]],
        make_inner: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    ) -> None:
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        inner_groups = []
        for group in param_groups:
            masters = [self._master_of(parameter) for parameter in group["params"]]
            inner_groups.append({**group, "params": masters})
        self.inner = make_inner(inner_groups)
        # Schedulers and loggers read and write these; sharing them keeps one learning rate.
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state
        self.defaults = self.inner.defaults
        self._optimizer_step_pre_hooks = self.inner._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = self.inner._optimizer_step_post_hooks

    def _master_of(self, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.dtype not in HALF_DTYPES:
            return parameter
        master = nn.Parameter(parameter.detach().to(torch.float32, copy=True))
        self._pairs.append((parameter, master))
        return master

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the masters from the gradients of the half-precision weights, then round once."""
        for parameter, master in self._pairs:
            master.grad = None if parameter.grad is None else parameter.grad.to(torch.float32)
        loss = self.inner.step(closure) if closure is not None else self.inner.step()
        if self._pairs:
            targets: list[torch.Tensor] = [parameter for parameter, _ in self._pairs]
            torch._foreach_copy_(targets, [master for _, master in self._pairs])
        for _, master in self._pairs:
            master.grad = None
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the model's parameters."""
        for parameter, _ in self._pairs:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state and the fp32 masters."""
        return {
            **self.inner.state_dict(),
            "masters": [master.detach() for _, master in self._pairs],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore both; the model's own weights are not touched.

        Raises:
            ValueError: the state belongs to another set of parameters.
        """
        masters = state_dict["masters"]
        if [master.shape for master in masters] != [master.shape for _, master in self._pairs]:
            raise ValueError("the optimizer state belongs to a model with other trained weights")
        self.inner.load_state_dict({k: v for k, v in state_dict.items() if k != "masters"})
        with torch.no_grad():
            for (_, master), saved in zip(self._pairs, masters, strict=True):
                master.copy_(saved)
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state


def needs_master_weights(model: nn.Module) -> bool:
    """Whether any trained parameter is kept in half precision."""
    return any(p.requires_grad and p.dtype in HALF_DTYPES for p in model.parameters())


def parameter_groups(
    model: nn.Module,
    *,
    decay_names: set[str],
    weight_decay: float,
    learning_rate: float,
    lora_plus_ratio: float | None,
) -> list[dict[str, Any]]:
    """Trained parameters in groups: with and without weight decay, and LoRA's B matrices apart.

    Args:
        model: the model, adapters attached.
        decay_names: names of the parameters that weight decay applies to.
        weight_decay: for those.
        learning_rate: of everything but LoRA's B matrices.
        lora_plus_ratio: the B matrices learn this many times faster (LoRA+, arXiv:2402.12354).
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_fast = lora_plus_ratio is not None and ".lora_B." in name
            groups.setdefault((name in decay_names, is_fast), []).append(parameter)
    return [
        {
            "params": parameters,
            "weight_decay": weight_decay if decays else 0.0,
            **({"lr": learning_rate * (lora_plus_ratio or 1.0)} if is_fast else {}),
        }
        for (decays, is_fast), parameters in groups.items()
    ]
