"""What a run ran on: packages, machine, GPUs, git state, and the command that repeats it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from trainkit.processes import LAUNCHER, STARTER
from trainkit.redact import REDACTED, redact, redact_argv, redact_text
from trainkit.version import __version__

# Variables that change what a run computes or where it runs; the rest of a person's environment
# is nobody's business.
_RELEVANT_VARIABLE = re.compile(
    r"^(?:CUDA|NVIDIA|NCCL|GLOO|TORCH|PYTORCH|TORCHINDUCTOR|TRITON|HF|TRANSFORMERS|TOKENIZERS"
    r"|ACCELERATE|FSDP|TORCHDYNAMO|TORCHAO|FLASH|XLA|XFORMERS|LIGER|ATEN|KMP|OPENBLAS|CUBLAS|CUDNN"
    r"|CUBLASLT|DS|DEEPSPEED|TRAINKIT|WANDB|OMP|MKL|BITSANDBYTES|BNB|PEFT|SLURM|UCX|FI)_"
    r"|^(?:MASTER_ADDR|MASTER_PORT|NNODES|NODE_RANK|NPROC_PER_NODE|WORLD_SIZE|LOCAL_WORLD_SIZE"
    r"|CUBLAS_WORKSPACE_CONFIG|PYTHONHASHSEED)$"
)
# Set for one process of one launch: exporting them again would pin the wrong process.
_SET_BY_LAUNCHER = re.compile(
    rf"^(?:{LAUNCHER}$|TORCH_DISABLE_SHARE_RDZV_TCP_STORE$|TORCHELASTIC_|TORCH_NCCL_ASYNC_ERROR_HANDLING$|WORLD_SIZE$|LOCAL_WORLD_SIZE$"
    r"|MASTER_ADDR$|MASTER_PORT$|NNODES$|NODE_RANK$|NPROC_PER_NODE$)"
)


def capture_environment(cwd: Path | None = None) -> dict[str, Any]:
    """Describe this process's surroundings as JSON-like values, without secrets.

    CUDA is read from torch only if it is imported already; ``nvidia-smi`` and ``git`` only if
    they are installed.
    """
    where = Path.cwd() if cwd is None else cwd
    return redact(
        {
            "trainkit": __version__,
            "python": {"version": platform.python_version(), "executable": sys.executable},
            "machine": _machine(),
            "gpus": _gpus(),
            "torch": _torch(),
            "git": repository_state(where),
            "working_directory": str(where),
            "argv": redact_argv(sys.orig_argv),
            "variables": relevant_variables(os.environ),
            "packages": _packages(),
        }
    )


def relevant_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that matter to a run, sorted; secret ones without their value."""
    names = sorted(name for name in environ if _RELEVANT_VARIABLE.match(name))
    found: dict[str, str] = redact({name: environ[name] for name in names}, environ)
    return found


def command_script(
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> str:
    environ = os.environ if environ is None else environ
    arguments = redact_argv(list(sys.orig_argv if argv is None else argv), environ)
    lines = [
        "#!/usr/bin/env bash",
        "# Runs the same command again. A new run gets a new directory; if the command names one",
        "# with --output-dir, change it first. The original recipe is recipe.yaml next to this.",
        "set -euo pipefail",
        f"cd {shlex.quote(str(Path.cwd() if cwd is None else cwd))}",
    ]
    for name, value in relevant_variables(environ).items():
        if REDACTED in value:
            lines.append(f"# {name} was set; it is a secret: export it yourself")
        elif not _SET_BY_LAUNCHER.match(name):
            lines.append(f"export {name}={shlex.quote(value)}")
    lines.append(f'exec {shlex.join(_started_again(arguments, environ))} "$@"')
    return "\n".join(lines) + "\n"


def _started_again(arguments: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The command of this process; of the launch, where it is one process of several."""
    if "TORCHELASTIC_RUN_ID" not in environ:
        return list(arguments)
    per_node = int(environ.get("LOCAL_WORLD_SIZE", "1"))
    num_nodes = int(environ.get("WORLD_SIZE", "1")) // per_node
    words = ["--nproc_per_node", str(per_node)]
    if num_nodes > 1:
        words += ["--nnodes", str(num_nodes), "--node_rank", environ.get("GROUP_RANK", "0")]
        words += ["--master_addr", environ.get("MASTER_ADDR", "127.0.0.1")]
        words += ["--master_port", environ.get("MASTER_PORT", "29500")]
    if LAUNCHER in environ and "sft" in arguments:
        restarts = environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
        words += [] if restarts == "0" else ["--max_restarts", restarts]
        options = arguments[arguments.index("sft") + 1 :]
        return [arguments[0], STARTER, "trainkit", "launch", *words, *options]
    # The child's own command line starts with its interpreter.
    return ["torchrun", *words, "--no_python", *arguments]


def _packages() -> dict[str, str]:
    """Names and versions, of the headers alone: what follows them is a README, slow to parse."""
    found = {}
    for distribution in importlib.metadata.distributions():
        texts = (distribution.read_text(name) for name in ("METADATA", "PKG-INFO", ""))
        headers = HeaderParser().parsestr(next(filter(None, texts), "").partition("\n\n")[0])
        if headers["Name"]:
            found[headers["Name"]] = headers["Version"]
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def _machine() -> dict[str, Any]:
    cpu, information = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if information.exists():
        named = re.search(
            r"^model name\s*:(.*)", information.read_text(errors="replace"), re.MULTILINE
        )
        cpu = named[1].strip() if named else cpu
    try:
        memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError):
        memory = None
    is_linux = sys.platform == "linux"
    return {
        "host": socket.gethostname(),
        "os": platform.platform(),
        "cpu": cpu,
        "num_cpus": os.cpu_count(),
        "num_usable_cpus": len(os.sched_getaffinity(0)) if is_linux else os.cpu_count(),
        "memory_gib": memory,
    }


def _gpus() -> list[dict[str, Any]]:
    columns = ["index", "name", "driver_version", "memory.total", "compute_cap", "power.limit"]
    query = f"--query-gpu={','.join(columns)}"
    output = _output(["nvidia-smi", query, "--format=csv,noheader,nounits"])
    if output is None:
        return []
    keys = ["index", "name", "driver", "memory_mib", "compute_capability", "power_limit_watts"]
    rows = [line.split(", ") for line in output.splitlines() if line.strip()]
    return [dict(zip(keys, row, strict=False)) for row in rows if len(row) == len(keys)]


def _torch() -> dict[str, Any] | None:
    """What torch knows, if this process has imported it; reading must not start CUDA."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    details: dict[str, Any] = {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "num_threads": torch.get_num_threads(),
    }
    if torch.version.cuda is not None and torch.cuda.is_initialized():
        count = torch.cuda.device_count()
        details["devices"] = [torch.cuda.get_device_name(index) for index in range(count)]
        details["cudnn"] = torch.backends.cudnn.version()
        details["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return details


_SECONDS = 20
_LARGEST_DIFF_BYTES = 1 << 20


def repository_state(where: Path) -> dict[str, Any] | None:
    """Commit, branch and uncommitted changes of the repository around ``where``.

    A repository's configuration may name programs: monitors, filters, converters, hooks, helpers of
    remotes. So its own is read only to find it, which runs nothing; what changed is asked of a
    stand-in for its git directory that has its index and objects and no configuration.
    """

    def git(*words: str, **variables: str) -> str | None:
        return _output(["git", *words], where, variables)

    places = ["--absolute-git-dir", "--git-common-dir", "--show-toplevel"]
    found = git("rev-parse", *places, "HEAD", "--abbrev-ref", "HEAD")
    if found is None or found.count("\n") != 5:
        return None
    directory, common, root, commit, branch = found.splitlines()
    # A configuration may also name files elsewhere as its own.
    if not where.resolve().is_relative_to(Path(root).resolve()):
        return None
    changed = diff = None
    objects, index = where / common / "objects", Path(directory)
    with tempfile.TemporaryDirectory() as stand_in:
        made, kind = Path(stand_in), "sha1" if len(commit) == 40 else "sha256"
        (made / "config").write_text(
            "[core]\n\trepositoryFormatVersion = 1\n\tbare = false\n"
            f"[extensions]\n\tobjectFormat = {kind}\n"
        )
        (made / "HEAD").write_text(f"{commit}\n")
        (made / "refs").mkdir()
        for file in (index / "index", *index.glob("sharedindex.*"), where / common / "info"):
            if file.exists():
                (made / file.name).symlink_to(file.resolve())
        around = {
            "GIT_DIR": stand_in,
            "GIT_WORK_TREE": root,
            "GIT_OBJECT_DIRECTORY": str(objects.resolve()),
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_ATTR_NOSYSTEM": "1",
        }
        where = Path(root)
        # A submodule has a configuration of its own: only which commit it is at is looked at.
        own = "--ignore-submodules=dirty"
        changed = git("status", "--porcelain", own, **around)
        if changed is not None:
            diff = git("diff", "HEAD", "--no-color", own, **around)
    if diff is not None:
        # First, so that no secret is cut in two and its rest not known for one.
        diff = redact_text(diff)
        if len(diff) > _LARGEST_DIFF_BYTES:
            diff = diff[:_LARGEST_DIFF_BYTES] + "\n... (cut: the diff is longer than 1 MiB)\n"
    return {
        "commit": commit,
        "branch": branch,
        "remote": (git("config", "--get", "remote.origin.url") or "").strip() or None,
        "dirty": None if changed is None else bool(changed),
        "changed_files": None if changed is None else changed.splitlines(),
        "diff": diff,
    }


def _output(
    command: list[str], where: Path | None = None, variables: Mapping[str, str] | None = None
) -> str | None:
    """A command's standard output, None if it is not installed, fails or takes too long."""
    if shutil.which(command[0]) is None:
        return None
    # A variable of git's could name programs too, or another repository.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environ |= {"GIT_OPTIONAL_LOCKS": "0", **(variables or {})}
    try:
        finished = subprocess.run(
            command,
            cwd=where,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return finished.stdout.decode(errors="replace") if finished.returncode == 0 else None
