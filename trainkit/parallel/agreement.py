"""The processes of a run agree on what they train, before they train it."""

import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from trainkit.errors import RecipeError, TrainkitError
from trainkit.parallel.process import ProcessRank

Decision = TypeVar("Decision")

_NUM_NAMED = 4


def refuse_disagreement(process: ProcessRank, facts: Mapping[str, Any]) -> None:
    """Compare what the processes were given; all of them call it, with a process group.

    Hosts that each have a recipe, data or packages of their own would train something that nobody
    has asked for, or wait for one another for half an hour.

    Args:
        process: this process.
        facts: name to a plain value, or to a mapping of such.

    Raises:
        RecipeError: the same on every process: naming each that differs from process 0, and in
            what.
    """
    if process.world_size == 1:
        return
    from accelerate.utils import gather_object

    flat = dict(_flattened(facts))
    everyone = gather_object([(process.dist_rank, socket.gethostname(), flat)])
    first = everyone[0][2]
    problems = []
    for dist_rank, host, theirs in everyone[1:]:
        keys = [key for key in {**first, **theirs} if first.get(key) != theirs.get(key)]
        if keys:
            named = [f"{key}: {theirs.get(key)!r}, not {first.get(key)!r}" for key in keys]
            more = f" and {len(keys) - _NUM_NAMED} more" if len(keys) > _NUM_NAMED else ""
            listed = "; ".join(named[:_NUM_NAMED])
            problems.append(f"    process {dist_rank} on {host} has {listed}{more}")
    if problems:
        shown = "\n".join(problems[:_NUM_NAMED])
        raise RecipeError(
            f"the processes were not given the same, compared with process 0:\n{shown}",
            fix="start every host with the same command, recipe, data and packages",
        )


def decided_by_main(process: ProcessRank, decide: Callable[[], Decision]) -> Decision:
    """Let rank 0 decide for all; what it cannot do is an error on every rank, not a hang."""
    decided: list[Any] = [None]
    if process.is_main:
        try:
            decided[0] = decide()
        except TrainkitError as error:
            decided[0] = error
    if process.world_size > 1:
        from accelerate.utils import broadcast_object_list

        broadcast_object_list(decided)
    if isinstance(decided[0], TrainkitError):
        raise decided[0]
    return cast(Decision, decided[0])


def largest_of(process: ProcessRank, number: int) -> int:
    """The largest of what the ranks have; all of them call it."""
    everyone = [number]
    if process.world_size > 1:
        from accelerate.utils import gather_object

        everyone = gather_object(everyone)
    return max(everyone)


def _flattened(facts: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
