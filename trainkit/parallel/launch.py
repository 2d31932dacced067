"""Which hosts a run is spread over: from NNODES and its like, or from Slurm. No torch."""

import errno
import logging
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from trainkit.errors import RecipeError
from trainkit.parallel.process import Machine, ProcessRank, whole_number
from trainkit.processes import module_command

DEFAULT_PORT = 29500
OWN_LAUNCH = "trainkit-"
"""How the names of launches begin that ``trainkit launch`` made, each of them once."""

_PROBE_SECONDS = 5
_LAST_PORT = 2**16 - 1
_TAKEN: list[socket.socket] = []  # the names of this process's ports


@dataclass(frozen=True)
class Hosts:
    """The hosts of one launch.

    Attributes:
        number: of hosts, as torchrun takes it: ``2``, or a range ``1:4``.
        rank: of this host, from 0.
        address: of host 0, as all hosts reach it.
        job: what tells this launch from every other, the same on all hosts; None where nobody
            said.
    """

    number: str = "1"
    rank: int = 0
    address: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    job: str | None = None

    @property
    def is_one(self) -> bool:
        return self.number == "1"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "Hosts":
        """Read NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT and TRAINKIT_JOB, or what srun sets."""
        given = os.environ if environment is None else environment
        variables = {**_of_slurm(given), **{name: text for name, text in given.items() if text}}
        number, last = _number_of_hosts(variables)
        job = variables.get("TRAINKIT_JOB")
        if number == "1":
            job = job or secrets.token_hex(8)
        port = whole_number(variables, "MASTER_PORT", 0, at_most=_LAST_PORT)
        return cls(
            number,
            whole_number(variables, "NODE_RANK", 0, at_most=last),
            variables.get("MASTER_ADDR", "127.0.0.1"),
            port or (free_port() if number == "1" else DEFAULT_PORT),
            None if job is None else OWN_LAUNCH + job,
        )

    def own_address(self) -> str:
        if self.rank == 0 or self.is_one:
            return self.address
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((self.address, self.port))  # sends nothing: asks for the route
            except OSError:
                return socket.getfqdn()
            return str(probe.getsockname()[0])

    def check_reachable(self, *, seconds: float) -> None:
        """See that the hosts can meet, before anything slow is started on them.

        Host 0 may be started later.
        """
        if self.is_one:
            return
        if self.rank == 0:
            self._check_own_port()
            return
        end = time.monotonic() + seconds
        while True:
            problem = self._problem_at_host_0()
            if problem is None:
                return
            if time.monotonic() > end:
                raise RecipeError(
                    f"host {self.rank} waited {seconds:.0f} s for host 0 at {self.address}:"
                    f"{self.port}, and nobody answered ({problem})",
                    where="MASTER_ADDR",
                    fix="start host 0 (NODE_RANK=0), and give every host the same MASTER_ADDR and "
                    "MASTER_PORT, which no firewall may close",
                )
            time.sleep(0.5)

    def _check_own_port(self) -> None:
        """Host 0 listens for a moment, and looks for itself where the others will."""
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("", self.port))
                listener.listen()
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                raise RecipeError(
                    f"port {self.port} of this host is in use by another program",
                    where="MASTER_PORT",
                    fix="set MASTER_PORT to another one, the same on every host",
                ) from error
            problem = self._problem_at_host_0() or _problem_of(listener)
        if problem is not None:
            raise RecipeError(
                f"NODE_RANK is 0, and this host is not reached at {self.address} ({problem})",
                where="MASTER_ADDR",
                fix="set it to the name or address of the host with NODE_RANK 0, on every host",
            )

    def _problem_at_host_0(self) -> str | None:
        try:
            socket.create_connection((self.address, self.port), timeout=_PROBE_SECONDS).close()
        except OSError as error:
            return error.strerror or str(error) or type(error).__name__
        return None


def _number_of_hosts(variables: Mapping[str, str]) -> tuple[str, int]:
    """As torchrun takes it, with the rank of the last host; 1:4 is a range, for elastic runs."""
    least, colon, most = variables.get("NNODES", "1").partition(":")
    if not colon:
        number = whole_number(variables, "NNODES", 1, at_least=1)
        return str(number), number - 1
    if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        raise RecipeError(
            f"NNODES is {variables['NNODES']!r} and must be a number of hosts, or the least "
            "and the most of them, as in 1:4",
            where="environment",
            fix="correct NNODES, the same on every host",
        )
    return f"{least}:{most}", int(most) - 1


def _problem_of(listener: socket.socket) -> str | None:
    """Whether who was asked for this host was another one: gateways answer for any address."""
    listener.settimeout(1)
    try:
        listener.accept()[0].close()
    except OSError:
        return "another host answers there"
    return None


def free_port() -> int:
    """A TCP port that nobody listens on, and that no other process of trainkit is given.

    It is used after a while, by another process, so a look whether it is free is not enough: of
    several launches at once two may look at the same one. Each is held until this process ends, by
    a name that the kernel gives to one process only. Chance draws it below the ports that Linux
    gives to connections.
    """
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            if _is_taken_for_us(port):
                return port


def _is_taken_for_us(port: int) -> bool:
    """Whether the name of a port could be taken; where there are no such names, chance decides."""
    if not sys.platform.startswith("linux"):
        return True
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0trainkit-port-{port}")
    except OSError as error:
        name.close()
        return error.errno != errno.EADDRINUSE
    name.set_inheritable(True)  # `trainkit launch` becomes torchrun, which uses the port
    _TAKEN.append(name)
    return True


def _of_slurm(variables: Mapping[str, str]) -> dict[str, str]:
    """What srun says, in torchrun's words; nothing outside of srun."""
    num_hosts = whole_number(variables, "SLURM_STEP_NUM_NODES", 1)
    if "SLURM_STEP_ID" not in variables:
        return {}
    job = f"slurm-{variables.get('SLURM_JOB_ID')}-{variables['SLURM_STEP_ID']}"
    num_tasks = whole_number(variables, "SLURM_STEP_NUM_TASKS", num_hosts)
    if num_tasks > num_hosts:
        raise RecipeError(
            f"srun started {num_tasks} tasks on {num_hosts} hosts",
            where="environment",
            fix="one task a host starts a process for each of its GPUs: --ntasks-per-node=1",
        )
    if num_hosts == 1:
        return {"TRAINKIT_JOB": job}
    return {
        "NNODES": str(num_hosts),
        "NODE_RANK": variables.get("SLURM_NODEID", "0"),
        "MASTER_ADDR": first_host(variables.get("SLURM_STEP_NODELIST", "127.0.0.1")),
        # Two jobs that share a host must not meet.
        "MASTER_PORT": str(20000 + whole_number(variables, "SLURM_JOB_ID", 0) % 20000),
        "TRAINKIT_JOB": job,
    }


def first_host(hosts: str) -> str:
    """The first of a list as Slurm writes it: ``gpu[03-05,9],login`` begins with ``gpu03``."""
    first = re.split(r",(?![^\[]*\])", hosts)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


# Where the processes of a run meet, when torchrun starts them once more.


def meet_anew(process: ProcessRank) -> None:
    """After a restart, agree on a store of this attempt's own; before there is a process group.

    torch 2.13 hands every attempt the same store of the agent's, in which the addresses of the
    killed processes still stand: the new ones would try to connect to those, for half a minute, and
    fail. On several hosts, attempts are not counted alike; ``trainkit launch`` asks for a store of
    each attempt's own there.
    """
    variables = os.environ
    attempt = int(variables.get("TORCHELASTIC_RESTART_COUNT") or 0)
    is_one_host = variables.get("LOCAL_WORLD_SIZE") == variables.get("WORLD_SIZE")
    if not attempt or variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not is_one_host:
        return
    from torch.distributed import TCPStore

    host, port = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
    old = TCPStore(host, port, process.world_size, is_master=False)
    key = f"trainkit/port_of_attempt_{attempt}"
    if process.is_main:
        old.set(key, str(free_port()))
    variables["MASTER_PORT"] = old.get(key).decode()
    variables["TORCHELASTIC_USE_AGENT_STORE"] = "False"


# How several processes of a run are started, and what this machine has. No torch.

_COUNTED_BY_TORCHRUN = ("auto", "gpu", "cpu", "xpu")


def count_local_gpus() -> int:
    """The number of NVIDIA GPUs this process may use, found without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    if shutil.which("nvidia-smi") is None:
        return 0
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def this_machine() -> Machine:
    """The machine a run started here would find, without importing torch."""
    num_gpus = count_local_gpus()
    return Machine(whole_number(os.environ, "WORLD_SIZE", max(num_gpus, 1)), on_cpu=num_gpus == 0)


def quieten_imports() -> None:
    """Spare the user what libraries say while they are imported on a machine without a GPU."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if count_local_gpus() == 0:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def launch_command(
    arguments: Sequence[str], hosts: Hosts, num_processes: int, *, max_restarts: int = 0
) -> list[str]:
    """The argument list that starts ``trainkit ARGUMENTS`` in every process of this host.

    NPROC_PER_NODE wins over ``num_processes``; ``max_restarts`` is how often torchrun starts all
    processes again after one has died.
    """
    wanted = os.environ.get("NPROC_PER_NODE") or str(num_processes)
    if wanted not in _COUNTED_BY_TORCHRUN:
        wanted = str(whole_number(os.environ, "NPROC_PER_NODE", num_processes, at_least=1))
    program = module_command("trainkit.cli.app", *arguments)
    if wanted == "1" and num_processes == 1 and hosts.is_one and not max_restarts:
        return program
    command = module_command("trainkit.train.faults.torchrun")
    command += ["--nnodes", hosts.number, "--nproc_per_node", wanted]
    if not max_restarts:
        command += ["--node_rank", str(hosts.rank)]
        command += ["--master_addr", hosts.address, "--master_port", str(hosts.port)]
        return [*command, *program[1:]]
    if hosts.job is None:
        raise RecipeError(
            "with --max-restarts, hosts find the run that they go on with by the name of the job, "
            "and it has none",
            where="TRAINKIT_JOB",
            fix="set it to a word that is new for each job, the same on every host (under Slurm "
            "the number of the job is taken)",
        )
    command += ["--max-restarts", str(max_restarts), "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", f"{hosts.address}:{hosts.port}", "--rdzv-id", hosts.job]
    command += ["--rdzv-conf", f"is_host={int(hosts.rank == 0)}"]
    return [*command, "--local-addr", hosts.own_address(), *program[1:]]


def threads_of_each(command: Sequence[str], num_gpus: int) -> str | None:
    """What each process of a launch has as ``OMP_NUM_THREADS``; None where it is one process.

    Without a GPU they share the host's cores; with GPUs each has one thread, as under torchrun,
    which says so in four lines where nobody has set it.
    """
    if "--nproc_per_node" not in command:
        return None
    count = command[command.index("--nproc_per_node") + 1]
    if num_gpus or not count.isdecimal():
        return "1"
    return str(max(1, (os.cpu_count() or 1) // int(count)))


LAUNCH_VARIABLES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Each attempt of a launch with restarts meets at a store of its own: see `rendezvous`."""
