"""How several processes of a run are started, and what this machine has. No torch."""

import logging
import os
import shutil
import subprocess
from collections.abc import Sequence

from trainkit.errors import RecipeError
from trainkit.parallel.launch.hosts import Hosts
from trainkit.parallel.process import Machine, whole_number
from trainkit.processes import module_command

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
    world_size = whole_number(os.environ, "WORLD_SIZE", max(num_gpus, 1))
    return Machine(world_size, on_cpu=num_gpus == 0)


def quieten_imports() -> None:
    """Spare the user what libraries say while they are imported on a machine without a GPU."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if count_local_gpus() == 0:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def launch_command(
    arguments: Sequence[str], hosts: Hosts, num_processes: int, *, max_restarts: int = 0
) -> list[str]:
    """The argument list that starts ``trainkit ARGUMENTS`` in every process of this host.

    Args:
        arguments: after ``trainkit``.
        hosts: of the run.
        num_processes: of this host; NPROC_PER_NODE wins.
        max_restarts: how often torchrun starts all processes again after one has died.

    Raises:
        RecipeError: NPROC_PER_NODE is not a number, or restarts on several hosts have no name.
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
