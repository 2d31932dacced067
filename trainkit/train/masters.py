"""fp32 master weights for models trained in half precision, and steps inside the backward pass.

A bfloat16 weight near 1 has neighbours 2**-8 away, so an update of 1e-5 rounds to nothing.
DeepSpeed keeps an fp32 copy of such weights; without it, :class:`MasterWeightOptimizer` does. For
the same reason it sums gradients in fp32: in bf16 the sum of 32 micro-batches is off by a percent.

Bytes per trained half-precision weight: 2 for itself, 4 for the master, 4 for the fp32 gradient,
and the optimizer's state (8 for AdamW): 18. The half-precision gradient lives for a moment only;
with a step in the backward pass the fp32 one does, too.
"""

import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from trainkit.evaluation_mode import changed
from trainkit.parallel.engine import HALF_DTYPES

# Gradients as they arrive in the backward pass: averaged over ranks, measured, and watched.
#
# A parameter that steps in the backward pass knows nothing of the gradients that are still to
# come. So nothing is clipped, and a gradient that is NaN or infinite holds back its own step and
# all that follow; those before it were taken with sound gradients. The run then ends as it always
# does.


def on_gradient(parameter: torch.Tensor, method: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Call a method with a parameter whenever its gradient is complete.

    The hook does not keep the method's owner alive: Python's garbage collector cannot look into
    hooks, so an optimizer that one holds would never be freed, nor would its masters and states.
    """
    known = weakref.WeakMethod(method)

    def arrived(parameter: torch.Tensor) -> None:
        method = known()
        if method is not None:
            method(parameter)

    return parameter.register_post_accumulate_grad_hook(arrived)


class Arrivals:
    """What is known of a step's gradients when they are gone."""

    def __init__(self, device: torch.device, num_ranks: int = 1) -> None:
        self._num_ranks = num_ranks
        self._squares = torch.zeros((), device=device)
        self._is_bad = torch.zeros((), device=device)

    def block(self, is_bad: torch.Tensor) -> None:
        """Let no step be taken where ``is_bad``, 0-d on the device, is true."""
        self._is_bad = torch.maximum(self._is_bad, is_bad.float())

    def take(self, gradient: torch.Tensor) -> None:
        """Average a gradient over the ranks, in place, and take its norm."""
        if self._num_ranks > 1:
            torch.distributed.all_reduce(gradient.div_(self._num_ranks))
        from trainkit.kernels.adamw.function import add_square_sum_

        add_square_sum_(gradient, self._squares, self._is_bad)

    @property
    def held(self) -> torch.Tensor:
        """0-d, on the device: 1 where no further step may be taken."""
        return self._is_bad

    def lets_step(self, optimizer: Any) -> bool:
        """Whether the next step may be taken; torch's fused ones ask the device themselves."""
        if self._is_bad.is_cuda and getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.found_inf, optimizer.grad_scale = self._is_bad, None
            return True
        return not bool(self._is_bad)

    def norm(self) -> torch.Tensor:
        """Of all gradients of the step; fp32, 0-d."""
        return self._squares.sqrt()

    def end_step(self) -> None:
        self._squares = torch.zeros_like(self._squares)
        self._is_bad = torch.zeros_like(self._is_bad)


class MasterWeightOptimizer(torch.optim.Optimizer):
    """Runs any torch optimizer on fp32 copies of half-precision parameters.

    Parameters that are fp32 already are handed to the inner optimizer as they are. The copies live
    in the optimizer's state, so a checkpoint holds them and a resumed run continues exactly.

    With ``arrivals`` a parameter's step is taken in the backward pass, as soon as its gradient is
    there; ``step`` then only ends the step.
    """

    def __init__(
        self,
        param_groups: Iterable[dict[str, Any]],
        make_inner: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        arrivals: Arrivals | None = None,
    ) -> None:
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._masters: dict[torch.Tensor, nn.Parameter] = {}
        self._group_of: dict[torch.Tensor, int] = {}
        self._reducing: list[tuple[list[torch.Tensor], torch.Tensor, Any]] = []
        self._followed: DistributedDataParallel | None = None
        self._arrivals = arrivals
        self.leaves_gradients = False
        """Set while a wrapper (DDP) must find the gradients where autograd leaves them."""
        inner_groups = []
        for number, group in enumerate(param_groups):
            parameters = list(group["params"])
            self._group_of |= dict.fromkeys(parameters, number)
            masters = [each for parameter in parameters for each in self._masters_of(parameter)]
            inner_groups.append({**group, "params": masters})
            for parameter in parameters:
                if arrivals is not None:
                    on_gradient(parameter, self._step_at_once)
                elif parameter.dtype in HALF_DTYPES:
                    on_gradient(parameter, self._take_gradient)
        self.inner = make_inner(inner_groups)
        # Schedulers and loggers read and write these; sharing them keeps one learning rate.
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state
        self.defaults = self.inner.defaults
        self._optimizer_step_pre_hooks = self.inner._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = self.inner._optimizer_step_post_hooks

    def _masters_of(self, parameter: nn.Parameter) -> list[nn.Parameter]:
        if parameter.dtype not in HALF_DTYPES:
            return [parameter]
        master = nn.Parameter(parameter.detach().to(torch.float32, copy=True))
        self._pairs.append((parameter, master))
        self._masters[parameter] = master
        return [master]

    @property
    def masters(self) -> dict[torch.Tensor, nn.Parameter]:
        """Each half-precision parameter with its fp32 copy."""
        return self._masters

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether ``step`` obeys ``found_inf`` by itself, as torch's fused optimizers do."""
        return bool(getattr(self.inner, "_step_supports_amp_scaling", False))

    def parameters(self) -> Iterator[nn.Parameter]:
        for group in self.param_groups:
            yield from group["params"]

    @torch.no_grad()
    def _take_gradient(self, parameter: torch.Tensor) -> None:
        """Add a micro-batch's gradient in fp32, and let go of the half-precision one."""
        gradient = parameter.grad
        if gradient is None or self.leaves_gradients:
            return
        self._add_gradient(parameter, gradient)
        parameter.grad = None

    def _add_gradient(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        master = self._masters[parameter]
        if master.grad is None:
            master.grad = gradient.to(torch.float32)
        else:
            master.grad.add_(gradient)

    # -- steps in the backward pass -------------------------------------------------------------

    @torch.no_grad()
    def _step_at_once(self, parameter: torch.Tensor) -> None:
        """The gradient of a parameter is complete: take its step, and let go of the gradient."""
        if parameter.grad is None or self._arrivals is None:
            return
        self._arrivals.take(parameter.grad)
        if self._holds_back_itself(parameter) or self._arrivals.lets_step(self.inner):
            self._step_parameter(parameter)
        parameter.grad = None

    def _holds_back_itself(self, parameter: torch.Tensor) -> bool:
        """Whether the step of a parameter asks the device if it may be taken."""
        return False

    def _step_parameter(self, parameter: torch.Tensor) -> None:
        master = self._masters.get(parameter)
        if master is None:
            self._step_inner(parameter, parameter)
            return
        self._add_gradient(parameter, parameter.grad)  # type: ignore[arg-type]
        self._step_inner(parameter, master)
        parameter.copy_(master)
        master.grad = None

    def _step_inner(self, parameter: torch.Tensor, master: torch.Tensor) -> None:
        """The inner optimizer's step of one of the parameters it was given, and of no other."""
        with self._alone(parameter, master):
            self.inner.step()

    @contextmanager
    def _alone(self, parameter: torch.Tensor, master: torch.Tensor) -> Iterator[dict[str, Any]]:
        """The inner optimizer has one of its parameters alone; yields its group."""
        group = {**self.inner.param_groups[self._group_of[parameter]], "params": [master]}
        with changed([(self.inner, "param_groups", [group])]):
            yield group

    def block(self, is_bad: torch.Tensor) -> None:
        """Where ``is_bad`` is true, no parameter takes a step in the backward pass that follows."""
        if self._arrivals is not None:
            self._arrivals.block(is_bad)

    def clip(self, max_norm: float) -> torch.Tensor | None:
        """The gradients' norm where they have gone already; None where they wait to be clipped."""
        del max_norm  # nothing is clipped in the backward pass: the recipe says so
        return None if self._arrivals is None else self._arrivals.norm()

    # -- gradients ------------------------------------------------------------------------------

    def begin_micro_batch(self, model: nn.Module, *, accumulates: bool) -> None:
        """Before each micro-batch: leave DDP the gradients that it reduces."""
        if not isinstance(model, DistributedDataParallel):
            return
        # One rank under DDP, or sync_each_batch: every micro-batch was reduced, and has to be taken
        # before the next one would be added to it in half precision.
        self.gather_gradients()
        if accumulates and model is not self._followed:
            model.register_comm_hook(None, self.reduce_in_fp32)
            self._followed = model
        self.leaves_gradients = model.require_backward_grad_sync

    @torch.no_grad()
    def gather_gradients(self) -> "MasterWeightOptimizer":
        """Have all gradients in fp32 on our parameters, after the last micro-batch of a step."""
        for parameters, total, reduced in self._reducing:
            reduced.wait()
            pieces = total.split([parameter.numel() for parameter in parameters])
            for parameter, piece in zip(parameters, pieces, strict=True):
                self._set_gradient(parameter, piece)
                parameter.grad = None
        self._reducing.clear()
        self.leaves_gradients = False
        for parameter in self._halves():
            self._take_gradient(parameter)
        return self

    def _halves(self) -> Iterator[torch.Tensor]:
        return (parameter for parameter, _ in self._pairs)

    def _set_gradient(self, parameter: torch.Tensor, total: torch.Tensor) -> None:
        """Have ``total``, fp32 and flat, for a parameter's gradient."""
        self._masters[parameter].grad = total.view_as(parameter)

    def _earlier_gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The fp32 sum of micro-batches so far, flat."""
        gradient = self._masters[parameter].grad
        return None if gradient is None else gradient.flatten()

    @torch.no_grad()
    def reduce_in_fp32(
        self, group: Any, bucket: torch.distributed.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        """DDP's communication hook: the last micro-batch joins the others in fp32, then reduce.

        DDP knows the gradients of the last micro-batch only. What it copies back into the
        half-precision gradients is dropped by `gather_gradients`.
        """
        buffer, parameters = bucket.buffer(), bucket.parameters()
        is_half = buffer.dtype in HALF_DTYPES
        total = buffer.to(torch.float32)
        if is_half:
            sums = [self._earlier_gradient(parameter) for parameter in parameters]
            sizes = [parameter.numel() for parameter in parameters]
            for piece, earlier in zip(total.split(sizes), sums, strict=True):
                if earlier is not None:
                    piece.add_(earlier)
        total.div_(torch.distributed.get_world_size(group))
        work = torch.distributed.all_reduce(total, group=group, async_op=True)
        reduced = work.get_future()
        if is_half:
            self._reducing.append((parameters, total, reduced))
        return reduced.then(lambda _: buffer if is_half else total)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the masters from their fp32 gradients, then round the weights once."""
        if self._arrivals is not None:
            self._arrivals.end_step()
            return None
        self.gather_gradients()
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None:  # set only where the inner optimizer obeys it
            self.inner.found_inf, self.inner.grad_scale = found_inf, None  # type: ignore[attr-defined]
        return self._step_all(closure)

    def _step_all(self, closure: Callable[[], float] | None) -> float | None:
        loss = self.inner.step(closure) if closure is not None else self.inner.step()
        if self._pairs:
            targets: list[torch.Tensor] = [parameter for parameter, _ in self._pairs]
            torch._foreach_copy_(targets, [master for _, master in self._pairs])
        for _, master in self._pairs:
            master.grad = None
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the model's parameters and of their masters."""
        for parameter in self._halves():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {
            **self.inner.state_dict(),
            "masters": [master.detach() for _, master in self._pairs],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore both; the model's own weights are not touched.

        Without ``masters`` in it they stay: they were restored by themselves.
        """
        masters = state_dict.get("masters", [master for _, master in self._pairs])
        if [master.shape for master in masters] != [master.shape for _, master in self._pairs]:
            raise ValueError("the optimizer state belongs to a model with other trained weights")
        self.inner.load_state_dict({k: v for k, v in state_dict.items() if k != "masters"})
        with torch.no_grad():
            for (_, master), saved in zip(self._pairs, masters, strict=True):
                if saved is not master:
                    master.copy_(saved)
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state


# bfloat16 weights without fp32 masters: computed in fp32, rounded up or down by chance.
#
# A bfloat16 weight near 1 has neighbours 2**-8 away, so rounding to the nearest loses every smaller
# update. Rounded up with the probability of its place between the two neighbours, a weight is right
# on average, and small updates add up (stochastic rounding).
#
# The chance follows from the run's seed, the step and the parameter alone: a resumed run, another
# order of steps and every rank round alike.


# Steps of bitsandbytes' AdamW on bfloat16 weights in one kernel, which the host does not wait
# for.
#
# bitsandbytes steps an fp32 copy of the weights, waits for the device after each parameter, and a
# rounding by chance goes over the copy several times more. Its states are stepped here as they
# lie, 8-bit ones or fp32, paged or not: what a checkpoint holds is bitsandbytes' own.


def takes_one_pass(inner: Any) -> bool:
    """Whether an optimizer's parameters are stepped in one pass; else its own ``step`` does it."""
    is_theirs = type(inner).__module__.startswith("bitsandbytes.")
    if not is_theirs or getattr(inner, "optimizer_name", None) != "adam":
        return False
    return not (inner.args.max_unorm or inner.args.skip_zeros)


PIECE = 2**25
"""Numbers that are fp32 at a time, where an optimizer can take a parameter in pieces: with gradient
and noise 0.4 GiB. Of the 256 that 8-bit states share a scale among, none is in two pieces."""

_KEY = "rounding"


class RoundedWeightOptimizer(MasterWeightOptimizer):
    """Runs any torch optimizer on bfloat16 weights, each fp32 for the time of its own step.

    Gradients are summed in fp32 until their step, as with masters.

    ``in_pieces``: the optimizer is elementwise, and large parameters are taken in pieces.
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
        self.takes_one_pass = takes_one_pass(self.inner)
        self._constants: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

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
        fits = parameter.dtype == torch.bfloat16 and parameter.is_contiguous()
        return self.takes_one_pass and fits

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
        if self._holds_back_itself(parameter):
            if not self.inner.state[piece]:
                piece.data = weight  # for its place and shape
                with self._alone(parameter, piece) as alone:
                    self.inner.init_state(alone, piece, 0, 0)  # type: ignore[attr-defined]
            self._step_in_one_pass(parameter, piece, weight, gradient, chance)
        else:
            piece.data, piece.grad = weight.to(torch.float32), gradient.to(torch.float32)
            self._step_inner(parameter, piece)
            round_by_chance(weight, piece.data, chance)
        piece.grad, piece.data = None, kept

    def _step_in_one_pass(
        self,
        parameter: torch.Tensor,
        piece: nn.Parameter,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        chance: int,
    ) -> None:
        """Where the device says that no step may be taken nothing is changed."""
        from trainkit.kernels.adamw_8bit.function import adamw_8bit_

        group, device = self.param_groups[self._group_of[parameter]], weight.device
        if device not in self._constants:
            self._constants[device] = torch.zeros((), device=device), torch.ones((), device=device)
        none, one = self._constants[device]
        state = self.inner.state[piece]
        self.inner.prefetch_state(piece)  # type: ignore[attr-defined]
        state["step"] += 1
        has_codes = state["state1"].dtype == torch.uint8
        adamw_8bit_(
            weight.view(-1),
            gradient.contiguous().view(-1),
            (state["state1"].view(-1), state["state2"].view(-1)),
            (state["absmax1"], state["absmax2"]) if has_codes else None,
            one,
            none if self._arrivals is None else self._arrivals.held,
            seed=chance,
            step=state["step"],
            lr=float(group["lr"]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = super().step(closure)
        self._num_steps += 1
        return loss

    def _step_all(self, closure: Callable[[], float] | None) -> float | None:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for parameter in self._group_of:
            self._step_parameter(parameter)
        return loss

    def state_dict(self) -> dict[str, Any]:
        # A name of its own: pickle would write "step" once for this and the inner states, or twice.
        where = {"seed": self._seed, "num_steps": self._num_steps}
        self.settle()
        return {**self.inner.state_dict(), _KEY: where}

    def settle(self) -> None:
        """Wait for steps that the host has not waited for, before it looks at paged states."""
        for device in self._constants:  # of steps in one pass
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore both."""
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
