"""How several processes of a run are started, and what this machine has. No torch."""

import logging
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence

from trainkit.parallel.process import Machine, whole_number

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


def torchrun_command(arguments: Sequence[str], num_processes: int) -> list[str]:
    """The argument list that starts ``trainkit`` once for each GPU of this host.

    Honours NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT and NPROC_PER_NODE.

    Raises:
        RecipeError: one of them is not a number where torchrun needs one.
    """
    variables = os.environ
    if variables.get("NPROC_PER_NODE") not in _COUNTED_BY_TORCHRUN:
        whole_number(variables, "NPROC_PER_NODE", num_processes)
    if ":" not in variables.get("NNODES", ""):  # 1:4 is a range, for elastic runs
        whole_number(variables, "NNODES", 1)
    for name in ("NODE_RANK", "MASTER_PORT"):
        whole_number(variables, name, 0)
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nnodes", variables.get("NNODES") or "1"]
    command += ["--node_rank", variables.get("NODE_RANK") or "0"]
    command += ["--nproc_per_node", variables.get("NPROC_PER_NODE") or str(num_processes)]
    command += ["--master_addr", variables.get("MASTER_ADDR") or "127.0.0.1"]
    command += ["--master_port", variables.get("MASTER_PORT") or str(free_port())]
    return [*command, "-m", "trainkit.cli.app", *arguments]


def free_port() -> int:
    """A TCP port nobody listens on at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
