"""Where this process stands among its peers, and how several are started.

torchrun describes each process through environment variables; reading them needs no torch and no
process group, so the data can be prepared before any collective exists that could time out.
"""

import logging
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainkit.errors import RecipeError
from trainkit.recipe import Machine


@dataclass(frozen=True)
class ProcessPlace:
    """One process of a run: its global rank, its rank on this host, and how many there are."""

    dist_rank: int
    local_rank: int
    world_size: int

    @property
    def is_main(self) -> bool:
        """Whether this process writes the shared files of the run."""
        return self.dist_rank == 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "ProcessPlace":
        """Read RANK, LOCAL_RANK and WORLD_SIZE as torchrun sets them; one process without them.

        Raises:
            RecipeError: they are no numbers, or do not fit each other.
        """
        variables = os.environ if environment is None else environment
        world_size = _whole_number(variables, "WORLD_SIZE", 1)
        dist_rank = _whole_number(variables, "RANK", 0)
        if world_size < 1 or dist_rank >= world_size:
            raise RecipeError(
                f"RANK is {dist_rank}, and WORLD_SIZE {variables.get('WORLD_SIZE', 'is not set')}",
                where="environment",
                fix="start with torchrun, or unset both",
            )
        _whole_number(variables, "MASTER_PORT", 0)
        return cls(dist_rank, _whole_number(variables, "LOCAL_RANK", 0), world_size)


def _whole_number(variables: Mapping[str, str], name: str, default: int) -> int:
    text = variables.get(name) or str(default)
    if not text.strip().isdecimal():
        raise RecipeError(
            f"{name} is {text!r} and must be a whole number",
            where="environment",
            fix=f"unset {name}, or start with torchrun, which sets it",
        )
    return int(text)


def count_local_gpus() -> int:
    """The number of NVIDIA GPUs this process may use, asked without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    if shutil.which("nvidia-smi") is None:
        return 0
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def this_machine() -> Machine:
    """What a run started here would find, asked without importing torch."""
    num_gpus = count_local_gpus()
    world_size = _whole_number(os.environ, "WORLD_SIZE", max(num_gpus, 1))
    return Machine(world_size, on_cpu=num_gpus == 0)


def quieten_imports() -> None:
    """Spare the user what libraries say while they are imported on a machine without a GPU."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if count_local_gpus() == 0:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def torchrun_command(arguments: Sequence[str], num_processes: int) -> list[str]:
    """The argument list that starts ``trainkit`` once for each GPU of this host.

    Honours NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT and NPROC_PER_NODE.
    """
    variables = os.environ
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nnodes", variables.get("NNODES", "1")]
    command += ["--node_rank", variables.get("NODE_RANK", "0")]
    command += ["--nproc_per_node", variables.get("NPROC_PER_NODE", str(num_processes))]
    command += ["--master_addr", variables.get("MASTER_ADDR", "127.0.0.1")]
    command += ["--master_port", variables.get("MASTER_PORT") or str(free_port())]
    return [*command, "-m", "trainkit.cli.app", *arguments]


def free_port() -> int:
    """A TCP port nobody listens on at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def prepare_deepspeed(place: ProcessPlace, *, on_cpu: bool) -> None:
    """Make DeepSpeed start cleanly; call it before TrainingArguments exist.

    A single process started without torchrun gets the variables DeepSpeed would otherwise look for
    through MPI. On a CPU the shared-memory all-reduce is switched off: it would compile C++ for a
    minute at the first start, and gloo gives the same sums. Locks that a killed build left behind
    are removed, because every later build waits for them for ever.
    """
    if place.world_size == 1:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(free_port()))
        for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
            os.environ.setdefault(name, value)
    if place.local_rank == 0:
        _remove_stale_build_locks()
    if on_cpu:
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _remove_stale_build_locks() -> None:
    """Delete the lock files of extension builds that no compiler is working on any more."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    directory = Path(root) if root else Path.home() / ".cache" / "torch_extensions"
    if not directory.is_dir() or shutil.which("pgrep") is None:
        return
    building = subprocess.run(["pgrep", "-x", "ninja"], capture_output=True, check=False)
    if building.returncode == 0:
        return
    for lock in directory.glob("**/lock"):
        lock.unlink(missing_ok=True)
