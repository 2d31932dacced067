"""torchrun as ``trainkit launch`` runs it: signals are passed on, and exit codes are trainkit's.

    python -m trainkit.train.faults.torchrun TORCHRUN'S ARGUMENTS

torchrun itself dies of SIGUSR1, ends a run that was asked to stop with a traceback and exit code 1,
and with restarts begins such a run again.
"""

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from trainkit.errors import PREEMPTED, RecipeError, StoppedError
from trainkit.processes import LAUNCHER
from trainkit.train.faults.signals import acted_on, leave_to_others, watching_signals

SHUTDOWN_SECONDS = 600
"""How long processes may take to save before they are killed; schedulers have their own limit."""

_STOPPED = {PREEMPTED: signal.SIGTERM, StoppedError(signal.SIGINT, "").exit_code: signal.SIGINT}
"""Exit codes of a process that was asked to stop, and by what."""

_APART = """error: the hosts have lost one another: {}
  fix: host 0 keeps the place where they meet; where its launcher has ended, type the same line
    again on every host, and the run goes on from its last checkpoint"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run torchrun.

    Returns:
        The exit code: 75 where a signal stopped the run, 130 for Ctrl-C, and that of a process that
        has failed, or that a second signal has aborted.
    """
    try:
        with watching_signals():  # until torchrun has its own handlers
            return _run(sys.argv[1:] if arguments is None else arguments)
    except StoppedError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code


def _run(arguments: Sequence[str]) -> int:
    from torch.distributed import run
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher import api

    class StoppableAgent(LocalElasticAgent):
        """Stops when its processes were asked to, instead of starting them again."""

        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            agents[:] = [self]
            started: dict[int, Any] = super()._start_workers(worker_group)
            leave_to_others()  # who has processes waits for them to save
            return started

        def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *_: Any, **__: Any) -> None:
            if self._pcontext is not None:  # torch 2.11 has no setting for how long it waits
                self._pcontext.close(death_sig, SHUTDOWN_SECONDS)
            super()._shutdown(death_sig)

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            result = super()._monitor_workers(worker_group)
            codes = {failure.exitcode for failure in result.failures.values()}
            if codes and codes <= _STOPPED.keys():  # else one has failed, and it stopped the others
                raise SignalException("the processes were asked to stop", _STOPPED[min(codes)])
            if RecipeError.exit_code in codes:  # the next attempt would find the same
                self._remaining_restarts = 0
            return result

    agents: list[StoppableAgent] = []
    os.environ[LAUNCHER] = str(os.getpid())
    setattr(api, LocalElasticAgent.__name__, StoppableAgent)
    passed_on = ",".join(number.name for number in (*acted_on(), signal.SIGQUIT))
    try:
        run.main(["--signals-to-handle", passed_on, *arguments])
    except SignalException as error:
        failed = [code for code in _codes_of(agents) if code not in _STOPPED]
        return max(failed, default=StoppedError(error.sigval, "").exit_code)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:  # it could not say so itself
            name = signal.Signals(-failure.exitcode).name
            sys.stderr.write(f"rank {rank} (process {failure.pid}) was ended by {name}\n")
        return failure.exitcode if failure.exitcode > 0 else 1
    except RendezvousError as error:
        sys.stderr.write(f"{_APART.format(error)}\n")
        return 1
    return 0


def _codes_of(agents: Sequence[Any]) -> list[int]:
    """Exit codes of the processes; as shells have them where a signal ended one."""
    started = [agent._pcontext for agent in agents if agent._pcontext is not None]
    handlers = [each for context in started for each in context.subprocess_handlers.values()]
    codes = [handler.proc.returncode for handler in handlers]
    return [128 - code if code < 0 else code for code in codes if code is not None]


if __name__ == "__main__":
    sys.exit(main())
