"""What every op promises, and how it is measured.

An op comes with a reference in plain torch that repeats Hugging Face's arithmetic. Run in fp64 it
is the truth; run in the op's own dtype it shows how large an error the plain model already makes.
An op passes when its error, for each output and each gradient by itself, is at most `SLACK` times
that error plus a hair (see `hair`), or half an eps where it rounds at another scale.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

SLACK = 1.05


@dataclass(frozen=True)
class Draw:
    """A source of input tensors of one dtype on one device; one seed gives the same tensors."""

    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator

    @classmethod
    def seeded(cls, dtype: torch.dtype, device: torch.device | str, seed: int) -> "Draw":
        device = torch.device(device)
        return cls(dtype, device, torch.Generator(device).manual_seed(seed))

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normally distributed numbers, rounded to the dtype."""
        values = torch.randn(shape, generator=self.generator, device=self.device)
        return (values * scale).to(self.dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator, device=self.device)


@dataclass(frozen=True)
class OpCase:
    """One call of an op."""

    label: str
    inputs: Callable[[Draw], dict[str, Tensor]]
    grads: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OpSpec:
    """An op: its public function and its reference.

    Args:
        name: the public name.
        function: the public function.
        reference: the same signature in plain torch.
        outputs: names of what it returns.
        hardware_error: what a GPU's own arithmetic adds to the relative error, where it is less
            exact than fp32; derived where the spec is.
        own_rounding: whether a value on the way is rounded to the op's dtype at another scale than
            in the reference. Where rows are alike these roundings are alike too: either side may
            be off by up to half an eps, and the other by nothing.
        roundings: times as many values are rounded on the way as in the reference, as where the
            backward pass multiplies by rounded values too: independent errors add up as the root.
    """

    name: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    outputs: tuple[str, ...]
    hardware_error: float = 0.0
    own_rounding: bool = False
    roundings: float = 1.0


@dataclass(frozen=True)
class OpError:
    """The error of one output or gradient against fp64.

    ``ours`` and ``eager`` are relative errors: of the whole tensor in the Euclidean norm, or, where
    ``worst`` is set, of the worst element against the largest magnitude. ``floor`` is what an op's
    own rounding may always be off by, and ``share`` how much more its further roundings may add.
    """

    name: str
    worst: bool
    ours: float
    eager: float
    hair: float
    floor: float = 0.0
    share: float = 1.0

    @property
    def ok(self) -> bool:
        """Whether ours is as good as eager; false for NaN."""
        return self.ours <= max(SLACK * self.share * self.eager, self.floor) + self.hair


def hair(dtype: torch.dtype, *, worst: bool) -> float:
    """What an equally rounded result may differ by.

    Both sides compute in fp32 in their own order of summation and differ by a few units of 2^-24:
    4 eps for fp32 tensors, 8 for their worst element. In 16 bits such a difference flips the last
    rounding of an element with a chance of at most 2^-22 / 2^-11 (fp16), about one in a thousand,
    by one unit in the last place: 0.03 eps (sqrt(1/1000)) in the norm, one eps of the largest
    magnitude for the worst element.
    """
    single = torch.finfo(torch.float32).eps
    own = torch.finfo(dtype).eps
    if dtype == torch.float64:
        return 64 * own
    if worst:
        return 8 * single + (own if dtype != torch.float32 else 0.0)
    return 4 * single + (0.03 * own if dtype != torch.float32 else 0.0)


def run(
    function: Callable[..., Any],
    case: OpCase,
    tensors: Mapping[str, Tensor],
    grad_outputs: Callable[[Tensor], Tensor],
) -> tuple[list[Tensor], dict[str, Tensor]]:
    leaves = {
        name: tensor.detach().requires_grad_(name in case.grads) for name, tensor in tensors.items()
    }
    result = function(**leaves, **case.options)
    outputs = list(result) if isinstance(result, tuple) else [result]
    if not case.grads:
        return outputs, {}
    differentiable = [output for output in outputs if output.requires_grad]
    gradients = torch.autograd.grad(
        differentiable,
        [leaves[name] for name in case.grads],
        [grad_outputs(output) for output in differentiable],
    )
    return outputs, dict(zip(case.grads, gradients, strict=True))


def measure(
    spec: OpSpec, case: OpCase, dtype: torch.dtype, device: torch.device | str, seed: int = 0
) -> list[OpError]:
    """Errors of every output and gradient of one call, ours and eager's, against fp64."""
    tensors = case.inputs(Draw.seeded(dtype, device, seed))
    exact = {
        name: tensor.double() if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    incoming = _incoming(dtype, device, seed + 1)
    truth = run(spec.reference, case, exact, incoming)
    eager = run(spec.reference, case, tensors, incoming)
    ours = run(spec.function, case, tensors, incoming)

    extra = spec.hardware_error if torch.device(device).type == "cuda" else 0.0
    floor = torch.finfo(dtype).eps / 2 if spec.own_rounding else 0.0
    errors = []
    for name, want, plain, got in zip(
        [*spec.outputs, *[f"d{name}" for name in case.grads]],
        [*truth[0], *truth[1].values()],
        [*eager[0], *eager[1].values()],
        [*ours[0], *ours[1].values()],
        strict=True,
    ):
        if got.dtype != plain.dtype or got.shape != plain.shape:
            raise ValueError(
                f"{spec.name} {case.label}: {name} is {got.dtype} {tuple(got.shape)}, "
                f"the reference gives {plain.dtype} {tuple(plain.shape)}"
            )
        if not got.is_floating_point():
            wrong = float((got != want).any())
            errors.append(OpError(name, True, wrong, 0.0, 0.0))
            continue
        for worst in (False, True):
            errors.append(
                OpError(
                    name,
                    worst,
                    _relative_error(got, want, worst=worst),
                    _relative_error(plain, want, worst=worst),
                    hair(got.dtype if dtype != torch.float64 else dtype, worst=worst) + extra,
                    floor,
                    spec.roundings**0.5,
                )
            )
    return errors


def _incoming(
    dtype: torch.dtype, device: torch.device | str, seed: int
) -> Callable[[Tensor], Tensor]:
    """Incoming gradients that are equal for equal shapes, whatever the output's dtype."""

    def draw(output: Tensor) -> Tensor:
        return Draw.seeded(dtype, device, seed).normal(*output.shape).to(output.dtype)

    return draw


def _relative_error(value: Tensor, truth: Tensor, *, worst: bool) -> float:
    if not truth.numel():
        return 0.0
    truth = truth.detach().double()
    difference = value.detach().double() - truth
    error = float(difference.abs().max() if worst else difference.norm())
    size = float(truth.abs().max() if worst else truth.norm())
    return error / size if size else error
