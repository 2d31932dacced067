"""Which process of the run this is, and what machine it is on. No torch.

torchrun describes each process through environment variables; reading them needs no process group,
so the data can be prepared before any collective exists that could time out.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from trainkit.errors import RecipeError


@dataclass(frozen=True)
class ProcessRank:
    """One process of a run: its global rank, its rank on this host, and how many there are."""

    dist_rank: int
    local_rank: int
    world_size: int

    @property
    def is_main(self) -> bool:
        """Whether this process writes the shared files of the run."""
        return self.dist_rank == 0

    def announce(self, port: int) -> None:
        """Have a single process without torchrun find itself: it forms a group of one."""
        if self.world_size == 1:
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
            os.environ.setdefault("MASTER_PORT", str(port))
            for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
                os.environ.setdefault(name, value)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "ProcessRank":
        """Read RANK, LOCAL_RANK and WORLD_SIZE as torchrun sets them; one process without them."""
        variables = os.environ if environment is None else environment
        world_size = whole_number(variables, "WORLD_SIZE", 1)
        dist_rank = whole_number(variables, "RANK", 0)
        if world_size < 1 or dist_rank >= world_size:
            raise RecipeError(
                f"RANK is {dist_rank}, and WORLD_SIZE {variables.get('WORLD_SIZE', 'is not set')}",
                where="environment",
                fix="start with torchrun, or unset both",
            )
        whole_number(variables, "MASTER_PORT", 0)
        return cls(dist_rank, whole_number(variables, "LOCAL_RANK", 0), world_size)


def whole_number(
    variables: Mapping[str, str],
    name: str,
    default: int,
    *,
    at_least: int = 0,
    at_most: int = 2**31,
) -> int:
    text = variables.get(name) or str(default)
    if not text.strip().isdecimal() or not at_least <= int(text) <= at_most:
        bounds = f", {at_least} or more" if at_least else ""
        bounds = f" from {at_least} to {at_most}" if at_most < 2**31 else bounds
        raise RecipeError(
            f"{name} is {text!r} and must be a whole number{bounds}",
            where="environment",
            fix=f"unset {name}, or start with torchrun, which sets it",
        )
    return int(text)


@dataclass(frozen=True)
class Machine:
    """What of the machine decides values of a recipe."""

    world_size: int = 1
    on_cpu: bool = False
