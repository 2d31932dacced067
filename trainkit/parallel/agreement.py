"""The processes of a run agree on what they train, before they train it."""

import itertools
import json
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar, cast

from trainkit.errors import RecipeError, TrainkitError
from trainkit.parallel.process import ProcessRank

Decision = TypeVar("Decision")

_NUM_NAMED = 4
_PATIENCE = timedelta(minutes=10)
"""For the slowest process to come as far; all were started together."""
_KEPT: list[Any] = []  # the store that rank 0 has opened, for the process group to share

_COMPARISONS = itertools.count()
"""A process may run one command after another: what the last one compared is still in the store."""


def refuse_disagreement(process: ProcessRank, facts: Mapping[str, Any]) -> None:
    """Compare what the processes were given; all of them call it, with a process group.

    Hosts that each have a recipe, data or packages of their own would train something that nobody
    has asked for, or wait for one another for half an hour.
    """
    if process.world_size == 1:
        return
    from accelerate.utils import gather_object

    flat = dict(_flattened(facts))
    everyone = gather_object([(_name_of(process), flat)])
    first = everyone[0][1]
    _refuse(_problem(name, first, theirs) for name, theirs in everyone[1:])


def refuse_early_disagreement(process: ProcessRank, facts: Mapping[str, Any]) -> None:
    """Compare what is known before anything but torch is loaded.

    Processes meet at torchrun's own store where it has one for all of them. Else (each attempt of
    a launch with restarts on several hosts, other launchers) they meet where the process group will
    be formed: rank 0 opens the store there already.
    """
    if process.world_size == 1 or not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return
    from torch.distributed import DistError

    with suppress(DistError):  # who is not there is missed again, and named, when a group is formed
        _compare_at(_meeting_place(process), process, facts)


def _meeting_place(process: ProcessRank) -> Any:
    """A store that all processes of this attempt reach, none of another, and no other command."""
    number = next(_COMPARISONS)
    from torch.distributed import PrefixStore, TCPStore

    variables = os.environ
    address = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
    if variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        attempt = variables.get("TORCHELASTIC_RESTART_COUNT") or "0"
        store = TCPStore(*address, is_master=False, wait_for_workers=False, timeout=_PATIENCE)
        return PrefixStore(f"trainkit/agreement/{attempt}/{number}", store)
    # multi_tenant: the process group opens a store at this port once more, and shares its server.
    store = TCPStore(
        *address,
        is_master=process.is_main,
        wait_for_workers=False,
        timeout=_PATIENCE,
        multi_tenant=True,
    )
    if process.is_main:
        _KEPT.append(store)
    return PrefixStore(f"trainkit/agreement/{number}", store)


def _compare_at(store: Any, process: ProcessRank, facts: Mapping[str, Any]) -> None:
    """All leave together: rank 0 may be the one that keeps the store."""
    flat = json.loads(json.dumps(dict(_flattened(facts)), default=str))
    if process.is_main:
        store.set("first", json.dumps(flat))
    problem = _problem(_name_of(process), json.loads(store.get("first")), flat)
    if problem is not None:
        store.set(f"problem_{store.add('num_problems', 1)}", problem)
    if store.add("number", 1) == process.world_size:
        store.set("all", "are here")
    store.wait(["all"], _PATIENCE)
    numbers = range(1, store.add("num_problems", 0) + 1)
    problems = sorted(store.get(f"problem_{each}").decode() for each in numbers)
    if store.add("left", 1) == process.world_size:
        store.set("none", "is left")
    if process.is_main:
        store.wait(["none"], _PATIENCE)
    _refuse(problems)


def _name_of(process: ProcessRank) -> str:
    return f"process {process.dist_rank} on {socket.gethostname()}"


def _problem(name: str, first: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """In what the facts of a process differ from those of process 0, in a line."""
    keys = [key for key in {**first, **theirs} if first.get(key) != theirs.get(key)]
    if not keys:
        return None
    named = [f"{key}: {theirs.get(key)!r}, not {first.get(key)!r}" for key in keys]
    more = f" and {len(keys) - _NUM_NAMED} more" if len(keys) > _NUM_NAMED else ""
    return f"    {name} has {'; '.join(named[:_NUM_NAMED])}{more}"


def _refuse(problems: Iterable[str | None]) -> None:
    named = [problem for problem in problems if problem]
    if named:
        shown = "\n".join(named[:_NUM_NAMED])
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
        decided[0].is_told_elsewhere = not process.is_main
        raise decided[0]
    return cast(Decision, decided[0])


def decided_by_each(process: ProcessRank, decide: Callable[[], Decision]) -> Decision:
    """Let every rank decide for itself, all of them at once; what one refuses ends them all.

    Returns:
        What this rank has decided.
    """
    error: TrainkitError | None = None
    try:
        decided = decide()
    except TrainkitError as refused:
        error = refused
    errors = [error]
    if process.world_size > 1:
        from accelerate.utils import gather_object

        errors = gather_object(errors)
    first = next((each for each in errors if each is not None), None)
    if first is None:
        return decided
    before = [str(each) for each in errors[: process.dist_rank] if each is not None]
    raised = error or first
    raised.is_told_elsewhere = error is None or str(error) in before
    raise raised


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
