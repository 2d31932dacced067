"""Is this machine fit to train: THE TABLE of checks, each fault with the command that fixes it.

To add a check, add a function and a row.
"""

import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from trainkit.places import cache_of
from trainkit.processes import module_command

State = Literal["ok", "warning", "error"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        state: ``error`` where training cannot work, ``warning`` where something will be slow,
            missing or fail later.
        fix: the command that fixes it; what is more to say follows a ``#``. Everything that
            is not ok has one.
    """

    check: str
    state: State
    found: str
    fix: str | None = None


def judged(check: str, found: str, *, fault: State, fix: str | None) -> Finding:
    return Finding(check, "ok" if fix is None else fault, found, fix)


_GIB = 2**30

# -- Python, the packages and the compiler ---------------------------------------------------------

_INSTALL = "pip install trainkit  # or pip install -e . in a checkout"


def check_python() -> Iterator[Finding]:
    version = platform.python_version()
    try:
        needed = importlib.metadata.metadata("trainkit")["Requires-Python"] or ""
    except importlib.metadata.PackageNotFoundError:
        needed = ""
    fits = SpecifierSet(needed).contains(version, prereleases=True)
    yield judged(
        "python",
        f"{version} ({sys.executable}); trainkit needs {needed or 'what its package says'}",
        fault="error",
        fix=None if fits else "uv venv --python 3.12  # then install trainkit in it",
    )


def check_packages() -> Iterator[Finding]:
    """The versions that are installed against those that trainkit is tested with."""
    try:
        lines = importlib.metadata.requires("trainkit") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("packages", "error", "trainkit is not installed", _INSTALL)
        return
    # One line a package; those of the test extra say nothing about training.
    wanted_here = {
        requirement.name: requirement
        for requirement in map(Requirement, reversed(lines))
        if 'extra == "test"' not in str(requirement.marker)
    }
    for name, requirement in reversed(wanted_here.items()):
        optional = "extra" in str(requirement.marker or "")
        if requirement.marker and not optional and not requirement.marker.evaluate():
            continue
        command = f"pip install '{name}{requirement.specifier}'"
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if not optional:
                yield Finding(name, "error", "not installed", command)
            continue
        fits = requirement.specifier.contains(version, prereleases=True)
        wanted = f", tested with {requirement.specifier}" if str(requirement.specifier) else ""
        yield judged(name, f"{version}{wanted}", fault="error", fix=None if fits else command)


def check_bytecode() -> Iterator[Finding]:
    """Without a place for compiled modules, every start compiles thousands of them again."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return
    cached = Path(importlib.util.cache_from_source(spec.origin))
    folder = next(each for each in cached.parents if each.exists())
    if cached.exists() or (not sys.dont_write_bytecode and os.access(folder, os.W_OK)):
        yield Finding("bytecode", "ok", "modules are compiled once")
        return
    why = "PYTHONDONTWRITEBYTECODE is set" if sys.dont_write_bytecode else f"{folder} is read-only"
    found = f"{why}: every start compiles some 5000 modules, about ten seconds"
    fix = "unset PYTHONDONTWRITEBYTECODE; export PYTHONPYCACHEPREFIX=~/.cache/python"
    yield Finding("bytecode", "warning", found, fix)


def check_compiler() -> Iterator[Finding]:
    """Triton compiles a launcher with the C compiler when a kernel runs for the first time."""
    named = os.environ.get("CC")
    found = shutil.which(named.split()[0]) if named and named.split() else None
    compiler = found or (None if named else shutil.which("cc") or shutil.which("gcc"))
    if named and not compiler:
        yield Finding("c compiler", "error", f"CC={named} is no program here", "unset CC")
        return
    none = "none: Triton kernels and DeepSpeed's CPU optimizer cannot be compiled"
    fix = None if compiler else "apt-get install -y build-essential"
    yield judged("c compiler", compiler or none, fault="warning", fix=fix)


# -- GPUs, their driver, and how they talk to each other ------------------------------------------

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
    import torch

    hiding = os.environ.get(_HIDING)
    if not _DRIVER_LOADED.exists() and shutil.which("nvidia-smi") is None:
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
        return Finding("gpu", "error", f"{_HIDING}={hiding!r} leaves none", f"unset {_HIDING}")
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
    said = "it finds no device"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        said = (str(error) or type(error).__name__).splitlines()[0][:200]
    what = f"driver {version} is too old for torch {torch.__version__} (CUDA {torch.version.cuda})"
    return Finding("gpu", "error", f"{what}: {said}", f"{_OLDER_TORCH}  # or a newer driver")


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
    fix = "sudo reboot  # the driver's module and its library differ"
    if shutil.which("nvidia-smi") is None:
        fix = "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility ..."
    found = version or f"unknown: {trouble}"
    yield judged("driver", found, fault="warning", fix=None if version else fix)


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
    fix = None
    if apart:
        found = f"{found}; pairs that talk through the host's memory: {', '.join(apart[:8])}"
        fix = "nvidia-smi topo -m  # shows the links; IOMMU or ACS of the host is the usual reason"
    yield judged("nccl", found, fault="warning", fix=fix)


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


# -- Disk, shared memory, limits of the shell, and the hub ----------------------------------------

_SMALL_SHM_GIB = 1.0
_SMALL_DISK_GIB = 20.0
_HUB_SECONDS = 5.0
_SHM = Path("/dev/shm")
_INFINIBAND = Path("/sys/class/infiniband")

_LIMITS = {
    "open files": (resource.RLIMIT_NOFILE, 4096, "n", "nofile"),
    "processes": (resource.RLIMIT_NPROC, 4096, "u", "nproc"),
    "address space": (resource.RLIMIT_AS, resource.RLIM_INFINITY, "v", "as"),
}
_LOCKED_MEMORY = (resource.RLIMIT_MEMLOCK, resource.RLIM_INFINITY, "l", "memlock")


def check_disk() -> Iterator[Finding]:
    """Room and the right to write, where runs, models, prepared data and kernels go."""
    from huggingface_hub import constants

    triton = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton"
    places = {
        "disk here": (Path.cwd(), "cd /a/larger/disk  # or give a run's place: -o /a/larger/disk"),
        "hub cache": (Path(constants.HF_HUB_CACHE), "export HF_HOME=/a/larger/disk/hf"),
        "data cache": (cache_of("data"), "export XDG_CACHE_HOME=/a/larger/disk/cache"),
        "kernel cache": (Path(triton), "export TRITON_CACHE_DIR=/a/larger/disk/triton"),
        "temporary files": (Path(tempfile.gettempdir()), "export TMPDIR=/a/larger/disk/tmp"),
    }
    for name, (path, elsewhere) in places.items():
        yield _room(name, path, elsewhere)


def _room(name: str, path: Path, elsewhere: str) -> Finding:
    existing = next(each for each in (path, *path.parents) if each.exists())
    free = shutil.disk_usage(existing).free / _GIB
    space = os.statvfs(existing)
    enough = _SMALL_DISK_GIB if name in ("disk here", "hub cache") else 1.0
    found = f"{free:.0f} GiB free at {path}"
    state: State = "warning"
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        state, found = "error", f"{found}, not writable"
    elif space.f_files and not space.f_favail:
        state, found = "error", f"{found}, and no room for one more file (df -i)"
    elif free > enough:
        return Finding(name, "ok", found)
    return Finding(name, state, found, elsewhere)


def check_shared_memory() -> Iterator[Finding]:
    """NCCL and processes that load data meet there."""
    name = "shared memory"
    if not _SHM.exists():
        make = f"sudo mkdir {_SHM} && sudo mount -t tmpfs -o size=16g tmpfs {_SHM}"
        yield Finding(name, "warning", f"there is no {_SHM}", make)
        return
    usage = shutil.disk_usage(_SHM)
    found = f"{usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB free at {_SHM}"
    fix = None
    if usage.total < _SMALL_SHM_GIB * _GIB:
        fix = (
            f"sudo mount -o remount,size=16g {_SHM}  # a container: docker run --shm-size=16g, "
            "or --ipc=host"
        )
    elif usage.free < _SMALL_SHM_GIB * _GIB:
        fix = f"ls -lhS {_SHM}  # remove what ended processes left there"
    yield judged(name, found, fault="warning", fix=fix)


def check_limits() -> Iterator[Finding]:
    limits = dict(_LIMITS)
    if _INFINIBAND.exists() and any(_INFINIBAND.iterdir()):
        limits["locked memory"] = _LOCKED_MEMORY  # NCCL pins buffers for InfiniBand
    for name, (kind, needed, flag, entry) in limits.items():
        soft, hard = resource.getrlimit(kind)
        few = _is_less(soft, needed)
        wanted = "unlimited" if needed == resource.RLIM_INFINITY else str(needed * 16)
        if _is_less(hard, needed):  # the shell cannot raise it by itself
            docker = f"docker run --ulimit {entry}={'-1' if wanted == 'unlimited' else wanted}"
            fix = (
                f"echo '* - {entry} {wanted}' | sudo tee -a /etc/security/limits.conf  # then log "
                f"in again; a container: {docker}"
            )
        else:
            fix = f"ulimit -{flag} {wanted if hard == resource.RLIM_INFINITY else hard}"
        found = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
        yield judged(name, found, fault="warning", fix=fix if few else None)


def _is_less(limit: int, needed: int) -> bool:
    if limit == resource.RLIM_INFINITY:
        return False
    return needed == resource.RLIM_INFINITY or limit < needed


def check_hub() -> Iterator[Finding]:
    """The hub, or the mirror that HF_ENDPOINT names, answers; a token that is set is good."""
    from huggingface_hub import constants, get_token

    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(name, "").upper() in constants.ENV_VARS_TRUE_VALUES:
            yield Finding("hub", "warning", f"{name} is set: only what is cached", f"unset {name}")
            return
    endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
    token = get_token()
    status, trouble = _answer(f"{endpoint}/api/whoami-v2", token)
    if status is None or status == 407:
        yield Finding(
            "hub",
            "warning",
            f"{endpoint} cannot be reached ({trouble})",
            "export HTTPS_PROXY=http://PROXY:PORT  # or HF_ENDPOINT=https://MIRROR, or a directory "
            "as model.name_or_path",
        )
    elif status >= 500:
        yield Finding(
            "hub", "warning", f"{endpoint} answers {status}", "trainkit doctor  # again later"
        )
    elif token and status in (401, 403):
        found = f"{endpoint} can be reached, and refuses the token that is set"
        yield Finding("hub", "warning", found, "hf auth login")
    else:
        said = "a token is set" if token else "no token: private and gated models are refused"
        yield Finding("hub", "ok", f"{endpoint} can be reached, {said}")


def _answer(url: str, token: str | None) -> tuple[int | None, str]:
    """The status that a server answers with, through the proxies of the environment."""
    try:
        request = urllib.request.Request(url)
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        with urllib.request.urlopen(request, timeout=_HUB_SECONDS) as answer:
            return answer.status, ""
    except urllib.error.HTTPError as error:
        return error.code, str(error)
    except (OSError, ValueError) as error:
        return None, str(getattr(error, "reason", error))


CHECKS: Mapping[str, Callable[[], Iterator[Finding]]] = {
    "python": check_python,
    "packages": check_packages,
    "bytecode": check_bytecode,
    "gpu": check_gpus,
    "driver": check_driver,
    "nccl": check_nccl,
    "compiler": check_compiler,
    "all-reduce": check_all_reduce,
    "disk": check_disk,
    "shared memory": check_shared_memory,
    "limits": check_limits,
    "hub": check_hub,
}


def diagnose() -> Iterator[Finding]:
    """Run every check, in order; one that fails itself is a finding, too."""
    for name, check in CHECKS.items():
        try:
            yield from check()
        except Exception as error:  # whatever a broken driver or package raises is the finding
            fix = f"python -c 'from trainkit.doctor import CHECKS; list(CHECKS[\"{name}\"]())'"
            if isinstance(error, ImportError):
                fix = "pip install --force-reinstall trainkit"
            yield Finding(name, "error", f"{type(error).__name__}: {error}", fix)
