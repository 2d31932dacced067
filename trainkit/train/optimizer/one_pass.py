"""Steps of bitsandbytes' AdamW on bfloat16 weights in one kernel, which the host does not wait for.

bitsandbytes steps an fp32 copy of the weights, waits for the device after each parameter, and a
rounding by chance goes over the copy several times more. Its states are stepped here as they lie,
8-bit ones or fp32, paged or not: what a checkpoint holds is bitsandbytes' own.
"""

from typing import Any

import torch
from torch import nn

from trainkit.kernels.adamw_8bit.function import adamw_8bit_


class OnePass:
    """Steps parameters of an optimizer of bitsandbytes.

    Args:
        inner: `one_pass_of` knows which.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._scalars: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def fits(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is stepped here."""
        return parameter.dtype == torch.bfloat16 and parameter.is_contiguous()

    def begin(self, group: dict[str, Any], piece: nn.Parameter) -> None:
        """Make the states of a parameter, which is the group's only one."""
        self._inner.init_state(group, piece, 0, 0)

    def step(
        self,
        group: dict[str, Any],
        piece: nn.Parameter,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        held: torch.Tensor | None,
        seed: int,
    ) -> None:
        """Step one parameter, or a piece of one.

        Args:
            group: its options.
            piece: what its states are found under.
            weight: bfloat16, contiguous; updated.
            gradient: of the same shape, in any precision.
            held: 0-d, on the device: where it is not 0 nothing is changed.
            seed: what the rounding follows from.
        """
        state = self._inner.state[piece]
        self._inner.prefetch_state(piece)
        state["step"] += 1
        has_codes = state["state1"].dtype == torch.uint8
        none, one = self._numbers(weight.device)
        adamw_8bit_(
            weight.view(-1),
            gradient.contiguous().view(-1),
            (state["state1"].view(-1), state["state2"].view(-1)),
            (state["absmax1"], state["absmax2"]) if has_codes else None,
            one,
            none if held is None else held,
            seed=seed,
            step=state["step"],
            lr=float(group["lr"]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
        )

    def settle(self) -> None:
        """Wait until the steps are taken: the host reads paged states itself."""
        for device in self._scalars:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def _numbers(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """0 and 1, there."""
        if device not in self._scalars:
            self._scalars[device] = torch.zeros((), device=device), torch.ones((), device=device)
        return self._scalars[device]


def one_pass_of(inner: Any) -> OnePass | None:
    """What steps an optimizer's parameters in one pass; None where its own ``step`` does.

    Args:
        inner: any optimizer.
    """
    is_theirs = type(inner).__module__.startswith("bitsandbytes.")
    if not is_theirs or getattr(inner, "optimizer_name", None) != "adam":
        return None
    if inner.args.max_unorm or inner.args.skip_zeros:
        return None
    return OnePass(inner)
