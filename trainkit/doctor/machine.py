"""Disk, shared memory, limits of the shell, and the hub."""

import dataclasses
import os
import resource
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from trainkit.places import cache_of

# -- What a check of a machine says ---------------------------------------------------------------


State = Literal["ok", "warning", "error"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        check: its name.
        state: ``error`` where training cannot work, ``warning`` where something will be slow,
            missing or fail later.
        found: what is there.
        fix: the command that fixes it; what is more to say follows a ``#``. Everything that
            is not ok has one.
    """

    check: str
    state: State
    found: str
    fix: str | None = None

    def __post_init__(self) -> None:
        if (self.state == "ok") != (self.fix is None):
            raise ValueError(f"{self.check}: a fault has a fix, and nothing else has")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as programs read them."""
        return dataclasses.asdict(self)


def judged(check: str, found: str, *, fault: State, fix: str | None) -> Finding:
    """A finding that is ok without a fix, and a fault with one."""
    return Finding(check, "ok" if fix is None else fault, found, fix)


_GIB = 2**30
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
    """What the shell allows a process."""
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
