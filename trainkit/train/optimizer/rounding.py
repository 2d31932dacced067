"""bfloat16 weights without fp32 masters: computed in fp32, rounded up or down by chance.

A bfloat16 weight near 1 has neighbours 2**-8 away, so rounding to the nearest loses every smaller
update. Rounded up with the probability of its place between the two neighbours, a weight is right
on average, and small updates add up (stochastic rounding).

The chance follows from the run's seed, the step and the parameter alone: a resumed run, another
order of steps and every rank round alike.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from trainkit.kernels.adamw_8bit.function import adamw_8bit_
from trainkit.train.optimizer.optim import HALF_DTYPES, Arrivals, MasterWeightOptimizer

# Steps of bitsandbytes' AdamW on bfloat16 weights in one kernel, which the host does not wait
# for.
#
# bitsandbytes steps an fp32 copy of the weights, waits for the device after each parameter, and a
# rounding by chance goes over the copy several times more. Its states are stepped here as they
# lie, 8-bit ones or fp32, paged or not: what a checkpoint holds is bitsandbytes' own.


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


PIECE = 2**25
"""Numbers that are fp32 at a time, where an optimizer can take a parameter in pieces: with gradient
and noise 0.4 GiB. Of the 256 that 8-bit states share a scale among, none is in two pieces."""

_KEY = "rounding"


class RoundedWeightOptimizer(MasterWeightOptimizer):
    """Runs any torch optimizer on bfloat16 weights, each fp32 for the time of its own step.

    Gradients are summed in fp32 until their step, as with masters.

    Args:
        param_groups: as torch optimizers take them.
        make_inner: builds the inner optimizer from groups of fp32 parameters.
        seed: of the run.
        in_pieces: the optimizer is elementwise: large parameters are taken in pieces.
        arrivals: see `MasterWeightOptimizer`.
    """

    def __init__(
        self,
        param_groups: Iterable[dict[str, Any]],
        make_inner: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        *,
        seed: int,
        in_pieces: bool,
        arrivals: Arrivals | None = None,
    ) -> None:
        self._seed, self._num_steps, self._in_pieces = seed, 0, in_pieces
        self._pieces: dict[torch.Tensor, list[nn.Parameter]] = {}
        self._place: dict[torch.Tensor, int] = {}
        super().__init__(param_groups, make_inner, arrivals)
        self._one_pass = one_pass_of(self.inner)

    def _masters_of(self, parameter: nn.Parameter) -> list[nn.Parameter]:
        if parameter.dtype not in HALF_DTYPES:
            return [parameter]
        if self._is_cut(parameter):
            shapes = [piece.shape for piece in parameter.detach().flatten().split(PIECE)]
        else:
            shapes = [parameter.shape]
        self._place[parameter] = len(self._place)
        # Of their values one number is kept, so that they have a shape for gradients to fit.
        self._pieces[parameter] = [
            nn.Parameter(torch.zeros((), device=parameter.device).expand(shape)) for shape in shapes
        ]
        return self._pieces[parameter]

    def _is_cut(self, parameter: torch.Tensor) -> bool:
        return self._in_pieces and parameter.numel() > PIECE

    def _cut(self, parameter: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Values of a parameter's size, as its pieces have them."""
        if self._is_cut(parameter):
            return values.detach().reshape(-1).split(PIECE)
        return (values.detach().view(parameter.shape),)

    def _halves(self) -> Iterator[torch.Tensor]:
        return iter(self._pieces)

    def _add_gradient(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        pieces = self._pieces[parameter]
        for piece, part in zip(pieces, self._cut(parameter, gradient), strict=True):
            if piece.grad is None:
                piece.grad = part.to(torch.float32, copy=True)
            else:
                piece.grad.add_(part)

    def _set_gradient(self, parameter: torch.Tensor, total: torch.Tensor) -> None:
        pieces = self._pieces[parameter]
        for piece, part in zip(pieces, self._cut(parameter, total), strict=True):
            piece.grad = part

    def _earlier_gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        gradients = [piece.grad for piece in self._pieces[parameter]]
        if any(gradient is None for gradient in gradients):
            return None
        return torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])

    def _holds_back_itself(self, parameter: torch.Tensor) -> bool:
        return self._one_pass is not None and self._one_pass.fits(parameter)

    def _step_parameter(self, parameter: torch.Tensor) -> None:
        if parameter not in self._pieces:
            super()._step_parameter(parameter)
            return
        pieces = self._pieces[parameter]
        gradients: Iterable[torch.Tensor | None] = [piece.grad for piece in pieces]
        if parameter.grad is not None:  # in the backward pass
            gradients = self._cut(parameter, parameter.grad)
        parts = zip(pieces, self._cut(parameter, parameter), gradients, strict=True)
        for number, (piece, weight, gradient) in enumerate(parts):
            if gradient is not None:
                self._step_piece(parameter, piece, weight, gradient, number)
            piece.grad = None

    def _step_piece(
        self,
        parameter: torch.Tensor,
        piece: nn.Parameter,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        number: int,
    ) -> None:
        chance = seed_of(self._seed, self._num_steps, self._place[parameter], number)
        kept = piece.data
        if self._one_pass is not None and self._one_pass.fits(parameter):
            if not self.inner.state[piece]:
                piece.data = weight  # for its place and shape
                with self._alone(parameter, piece) as alone:
                    self._one_pass.begin(alone, piece)
            group = self.param_groups[self._group_of[parameter]]
            held = None if self._arrivals is None else self._arrivals.held
            self._one_pass.step(group, piece, weight, gradient, held, chance)
        else:
            piece.data, piece.grad = weight.to(torch.float32), gradient.to(torch.float32)
            self._step_inner(parameter, piece)
            round_by_chance(weight, piece.data, chance)
        piece.grad, piece.data = None, kept

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = super().step(closure)
        self._num_steps += 1
        return loss

    def _step_all(self, closure: Callable[[], float] | None) -> float | None:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for parameter in self._group_of:
            self._step_parameter(parameter)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state, and where the chance is."""
        # A name of its own: pickle would write "step" once for this and the inner states, or twice.
        where = {"seed": self._seed, "num_steps": self._num_steps}
        self.settle()
        return {**self.inner.state_dict(), _KEY: where}

    def settle(self) -> None:
        """Wait for steps that the host has not waited for, before it looks at paged states."""
        if self._one_pass is not None:
            self._one_pass.settle()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore both.

        Raises:
            ValueError: the state belongs to another set of parameters, or to one with masters.
        """
        if _KEY not in state_dict:
            raise ValueError("the optimizer state was saved with fp32 masters")
        self.inner.load_state_dict({k: v for k, v in state_dict.items() if k != _KEY})
        self._seed, self._num_steps = state_dict[_KEY]["seed"], state_dict[_KEY]["num_steps"]
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state


def seed_of(*chance: int) -> int:
    """A generator's seed, below 2**62, that follows from some numbers."""
    digest = hashlib.blake2b(repr(chance).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


@torch.no_grad()
def round_by_chance(target: torch.Tensor, values: torch.Tensor, seed: int) -> None:
    """Write fp32 values into bfloat16 numbers, rounded up with the probability of their place.

    The upper 16 bits of an fp32 number are the next bfloat16 towards zero; noise added to the lower
    16 carries over as often as the number is far from it. What bfloat16 has stays as it is.

    Args:
        target: bfloat16.
        values: fp32, contiguous, of the same shape; overwritten.
        seed: what the noise follows from.
    """
    generator = torch.Generator(values.device).manual_seed(seed)
    bits = values.view(torch.int32)
    noise = torch.randint(
        2**16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator
    )
    bits.add_(noise.mul_(values.isfinite())).bitwise_and_(-(2**16))
    target.copy_(values)
