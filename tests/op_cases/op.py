"""An op with the calls of the contract suite: every shape and layout that it must take."""

from dataclasses import dataclass

from trainkit.kernels.contract import OpCase, OpSpec
from trainkit.kernels.ops import OPS


@dataclass(frozen=True)
class Case(OpCase):
    """A call; a large one is too slow for the interpreter, and needs a GPU."""

    large: bool = False


@dataclass(frozen=True, kw_only=True)
class TriedOp(OpSpec):
    """An op and its calls.

    Attributes:
        tiny: small enough for a numerical derivative.
        one_graph: whether torch.compile takes it without a break; None where it is never given it.
        has_habits: whether more than its errors is looked at; calls of another op may show it.
        smallest_target: compute capability, times ten, of the least GPU that has the kernel.
    """

    cases: tuple[Case, ...]
    tiny: Case
    one_graph: bool | None = True
    has_habits: bool = True
    smallest_target: int = 80


def tried(name, **calls):
    """An op of the registry with its calls."""
    return TriedOp(**vars(OPS[name]), **calls)
