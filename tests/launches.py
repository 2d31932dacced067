"""``trainkit launch`` with everything real but the start of its processes.

torchrun's own agent runs, with trainkit's handling of signals and exit codes; each rank is forked
from this process, behind the imports, instead of started as a program of its own.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time


def launch(argv, num_ranks, *, max_restarts=0, in_rank=lambda: None):
    """``NPROC_PER_NODE=N trainkit launch ARGV``, in this process, which is then the launcher.

    Args:
        argv: after ``trainkit launch``.
        num_ranks: N.
        max_restarts: as on the command line.
        in_rank: called in every rank before its command.

    Returns:
        The exit code.
    """
    from trainkit.parallel.launch import LAUNCH_VARIABLES, Hosts, launch_command
    from trainkit.train.faults import torchrun

    _fork_ranks(in_rank)
    os.environ["NPROC_PER_NODE"] = str(num_ranks)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        os.environ.pop(name, None)
    if max_restarts:
        os.environ.update(LAUNCH_VARIABLES)
    hosts = Hosts.from_environment({})
    command = launch_command(["sft", *argv], hosts, num_ranks, max_restarts=max_restarts)
    return torchrun.main(command[command.index(torchrun.__name__) + 1 :])


def plain_torchrun(argv, num_ranks, *, in_rank=lambda: None):
    """``torchrun --standalone --nproc_per_node N -m trainkit.cli.app ARGV``: without trainkit's.

    Args:
        argv: after ``trainkit``.
        num_ranks: N.
        in_rank: called in every rank before its command.

    Returns:
        The exit code.
    """
    from torch.distributed import run

    _fork_ranks(in_rank)
    run.main(["--standalone", "--nproc_per_node", str(num_ranks), "-m", "trainkit.cli.app", *argv])
    return 0  # it raises where a rank fails


def _fork_ranks(in_rank):
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    def popen(self, arguments, environment):
        return Fork(arguments, environment, in_rank)

    SubprocessHandler._popen = popen


class Fork:
    """What torchrun uses of ``subprocess.Popen``."""

    def __init__(self, arguments, environment, in_rank):
        self.args, self.returncode = arguments, None
        sys.stdout.flush(), sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            with contextlib.suppress(BaseException):
                os._exit(_rank(arguments, environment, in_rank))
            os._exit(1)

    def poll(self):
        """The exit code, or None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout=None):
        """Until it has ended."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.01)
        return self.returncode

    def send_signal(self, number):
        """As ``kill``."""
        os.kill(self.pid, number)


def _rank(arguments, environment, in_rank):
    """The command of one rank; what the launcher had open and caught is not its own."""
    from trainkit.cli.app import main

    os.setsid()
    os.closerange(3, 1024)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    in_rank()
    code = main(list(arguments[arguments.index("trainkit.cli.app") + 1 :]))
    sys.stdout.flush(), sys.stderr.flush()
    return code
