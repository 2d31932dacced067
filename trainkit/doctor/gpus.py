"""GPUs, their driver, and how they talk to each other."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from trainkit.doctor.machine import Finding, judged
from trainkit.processes import module_command

_GIB = 2**30
_FP8_CAPABILITY = (8, 9)
_QUERY_SECONDS = 20.0
_REDUCE_SECONDS = 120.0
_HIDING = "CUDA_VISIBLE_DEVICES"
_TORCH = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
_OLDER_TORCH = _TORCH.replace("cu130", "cu126")
_DRIVER_LOADED = Path("/proc/driver/nvidia/version")
_DEVICES = Path("/dev")


def check_gpus() -> Iterator[Finding]:
    """Every GPU that torch sees; or why it sees none."""
    import torch

    if not torch.cuda.is_available():
        yield _no_gpu()
        return
    arches = torch.cuda.get_arch_list()
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        capability = torch.cuda.get_device_capability(index)
        fp8 = "fp8" if capability >= _FP8_CAPABILITY else "no fp8"
        found = (
            f"{torch.cuda.get_device_name(index)}, {free / _GIB:.0f} of {total / _GIB:.0f} GiB "
            f"free, sm_{capability[0]}{capability[1]}, {fp8}"
        )
        if not _runs_on(capability, arches):
            found = f"{found}; torch {torch.__version__} has code for {', '.join(arches)} only"
            newer = _TORCH if capability > (9, 0) else _OLDER_TORCH
            yield Finding(f"gpu {index}", "error", found, newer)
            continue
        fix = "nvidia-smi  # shows which processes hold its memory; end yours with kill PID"
        taken = free < 0.9 * total
        yield judged(f"gpu {index}", found, fault="warning", fix=fix if taken else None)


def _runs_on(capability: tuple[int, int], arches: list[str]) -> bool:
    """Code for an earlier one of the same generation runs, and PTX on every later one."""
    for arch in arches:
        kind, _, number = arch.partition("_")
        digits = "".join(letter for letter in number if letter.isdecimal())
        if not digits:
            continue
        built = (int(digits[:-1]), int(digits[-1]))
        if built <= capability and (kind == "compute" or built[0] == capability[0]):
            return True
    return not arches


def _no_gpu() -> Finding:
    """Why torch sees no GPU."""
    import torch

    present = _DRIVER_LOADED.exists() or shutil.which("nvidia-smi") is not None
    hiding = os.environ.get(_HIDING)
    if not present:
        return Finding(
            "gpu",
            "warning",
            "none: trainkit trains on the CPU, slowly",
            "trainkit new smollm2-135m-lora-cpu -o recipe.yaml  # a run that suits a CPU",
        )
    if torch.version.cuda is None:
        what = f"torch {torch.__version__} is built for CPUs, and this machine has a GPU"
        return Finding("gpu", "error", what, _TORCH)
    if hiding is not None:
        what = f"{_HIDING}={hiding!r} leaves none"
        return Finding("gpu", "error", what, f"unset {_HIDING}")
    if not any(_DEVICES.glob("nvidia[0-9]*")):
        return Finding(
            "gpu",
            "error",
            "the host has a driver, and no GPU is handed to this container",
            "docker run --gpus all ...  # needs the NVIDIA container toolkit on the host",
        )
    version, trouble = _driver()
    if version is None:
        return Finding("gpu", "error", f"the driver does not answer: {trouble}", "sudo reboot")
    return Finding(
        "gpu",
        "error",
        f"driver {version} is too old for torch {torch.__version__} (CUDA {torch.version.cuda}): "
        f"{_refusal()}",
        f"{_OLDER_TORCH}  # or a newer driver",
    )


def _refusal() -> str:
    """What CUDA itself says."""
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    return "it finds no device"


def _driver() -> tuple[str | None, str]:
    """The driver's version, or None and why it is not known."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=False
        )
    except FileNotFoundError:
        return None, "nvidia-smi is not here"
    except (OSError, subprocess.SubprocessError) as error:
        return None, str(error)
    said = (found.stdout or found.stderr).strip().partition("\n")[0]
    return (said, "") if found.returncode == 0 and said else (None, said or "nvidia-smi failed")


def check_driver() -> Iterator[Finding]:
    """The driver's own tool answers; without a GPU there is nothing to say."""
    import torch

    if not torch.cuda.is_available():
        return
    version, trouble = _driver()
    if version is not None:
        yield Finding("driver", "ok", version)
    elif shutil.which("nvidia-smi") is None:
        fix = "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility ..."
        yield Finding("driver", "warning", f"unknown: {trouble}", fix)
    else:
        fix = "sudo reboot  # the driver's module and its library differ"
        yield Finding("driver", "warning", f"unknown: {trouble}", fix)


def check_nccl() -> Iterator[Finding]:
    """NCCL's version, and whether the GPUs reach each other's memory."""
    import torch

    gpus = torch.cuda.device_count()
    if gpus == 0:
        return
    version = ".".join(str(part) for part in torch.cuda.nccl.version())
    apart = [
        f"{one}-{other}"
        for one in range(gpus)
        for other in range(one + 1, gpus)
        if not torch.cuda.can_device_access_peer(one, other)
    ]
    found = f"{version}, {gpus} GPUs"
    if apart:
        found = f"{found}; pairs that talk through the host's memory: {', '.join(apart[:8])}"
    yield judged(
        "nccl",
        found,
        fault="warning",
        fix="nvidia-smi topo -m  # shows the links; IOMMU or ACS of the host is the usual reason"
        if apart
        else None,
    )


def check_all_reduce() -> Iterator[Finding]:
    """A real sum over all GPUs; over two CPU processes where there are fewer than two."""
    import torch

    gpus = torch.cuda.device_count()
    processes, backend = (gpus, "nccl") if gpus > 1 else (2, "gloo")
    name = f"{backend} all-reduce"
    command = module_command("torch.distributed.run", "--standalone")
    command += ["--nproc_per_node", str(processes)]
    command += module_command("trainkit.doctor.all_reduce", backend)[1:]
    again = "NCCL_DEBUG=INFO trainkit doctor" if gpus > 1 else "GLOO_DEBUG=1 trainkit doctor"
    interface = f"{backend.upper()}_SOCKET_IFNAME"
    if os.environ.get(interface):
        again = f"unset {interface}  # it is {os.environ[interface]!r}"
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_REDUCE_SECONDS,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield Finding(
            name,
            "error",
            f"{processes} processes did not finish a sum within {_REDUCE_SECONDS:.0f} s",
            f"{again}  # usual reasons: a firewall between the GPUs, a container without shared "
            "memory (docker run --shm-size=16g)",
        )
        return
    if done.returncode != 0:
        said = [line.strip() for line in done.stderr.splitlines() if "Error" in line]
        own = [line for line in said if "ChildFailedError" not in line]
        yield Finding(name, "error", (own or said or ["failed"])[-1][-400:], again)
        return
    yield Finding(name, "ok", done.stdout.strip().splitlines()[-1])
