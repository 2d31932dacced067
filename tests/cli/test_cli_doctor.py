"""``trainkit doctor``: every check answers, and a fault is named with what fixes it.

That every check answers here is seen in ``tests/run/test_run_started.py``.
"""

import importlib.metadata
import json
import resource
import shutil
import subprocess
import threading
from collections import namedtuple
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import huggingface_hub
import pytest
import torch

from trainkit.cli.app import main
from trainkit.doctor import CHECKS, Finding, checks

Usage = namedtuple("Usage", "total used free")
GIB = 2**30
UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("warning", 0), ("error", 1)])
def test_only_an_error_is_an_exit_code(state, code, capsys, monkeypatch):
    fix = None if state == "ok" else "pip install 'torch>=2.11'"
    monkeypatch.setattr(
        checks, "CHECKS", {"packages": lambda: iter([Finding("torch", state, "1.0", fix)])}
    )
    assert main(["doctor"]) == code
    assert ("fix: pip install 'torch>=2.11'" in capsys.readouterr().out) == (state != "ok")


def test_a_check_that_breaks_is_a_finding(capsys, monkeypatch):
    def broken():
        raise AssertionError("no such device")
        yield

    monkeypatch.setattr(checks, "CHECKS", {"gpu": broken})
    assert main(["doctor", "--json"]) == 1
    row = json.loads(capsys.readouterr().out)
    assert "no such device" in row["found"]
    assert row["fix"].startswith("python -c")


def version(name, found):
    real = importlib.metadata.version
    return lambda asked: found(asked) if asked == name else real(asked)


def missing(name):
    raise importlib.metadata.PackageNotFoundError(name)


def on_a_gpu_host(patch, *, cuda="13.0", present=True, smi="580.65", devices=True, tmp_path):
    """A machine on which torch sees no GPU although there is one."""
    patch.setattr(torch.cuda, "is_available", lambda: False)
    patch.setattr(torch.version, "cuda", cuda)
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    patch.setattr(checks, "_DRIVER_LOADED", Path("/" if present else "/none"))
    if devices:
        (tmp_path / "nvidia0").touch()
    patch.setattr(checks, "_DEVICES", tmp_path)
    answer = subprocess.CompletedProcess([], 0 if smi else 9, smi or "", "Driver/library mismatch")
    patch.setattr(checks.subprocess, "run", lambda *_, **__: answer)


def with_gpus(patch, count=1, capability=(9, 0), free=80, arches=("sm_80", "sm_90"), peers=True):
    """A machine with so many GPUs."""
    for name, value in {
        "is_available": True,
        "device_count": count,
        "get_arch_list": list(arches),
        "mem_get_info": (free * GIB, 80 * GIB),
        "get_device_capability": capability,
        "get_device_name": "a GPU",
        "can_device_access_peer": peers,
    }.items():
        patch.setattr(torch.cuda, name, lambda *_, value=value: value)
    patch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 3))


def limit(patch, which, soft, hard):
    real = resource.getrlimit
    patch.setattr(
        checks.resource, "getrlimit", lambda kind: (soft, hard) if kind == which else real(kind)
    )


def keep_bytecode(patch, folder, keeps):
    patch.setattr("sys.pycache_prefix", str(folder))
    patch.setattr("sys.dont_write_bytecode", not keeps)


FAULTS = {
    "python is too old": (
        "python",
        lambda patch, _: patch.setattr(checks.platform, "python_version", lambda: "3.9.1"),
        ("error", "3.9.1", "uv venv"),
    ),
    "trainkit is not installed": (
        "packages",
        lambda patch, _: patch.setattr(checks.importlib.metadata, "requires", missing),
        ("error", "not installed", "pip install"),
    ),
    "a package is missing": (
        "packages",
        lambda patch, _: patch.setattr(
            checks.importlib.metadata, "version", version("peft", missing)
        ),
        ("error", "not installed", "pip install 'peft>="),
    ),
    "a package is too new": (
        "packages",
        lambda patch, _: patch.setattr(
            checks.importlib.metadata, "version", version("transformers", lambda _: "6.1")
        ),
        ("error", "6.1, tested with", "pip install 'transformers<6"),
    ),
    "every start compiles all modules": (
        "bytecode",
        lambda patch, tmp: keep_bytecode(patch, tmp, False),
        ("warning", "PYTHONDONTWRITEBYTECODE is set", "unset PYTHONDONTWRITEBYTECODE"),
    ),
    "torch is for CPUs": (
        "gpu",
        lambda patch, tmp: on_a_gpu_host(patch, cuda=None, tmp_path=tmp),
        ("error", "built for CPUs", "pip install --force-reinstall torch"),
    ),
    "the GPU is hidden": (
        "gpu",
        lambda patch, tmp: (
            on_a_gpu_host(patch, tmp_path=tmp),
            patch.setenv("CUDA_VISIBLE_DEVICES", ""),
        ),
        ("error", "CUDA_VISIBLE_DEVICES=''", "unset CUDA_VISIBLE_DEVICES"),
    ),
    "the container has no GPU": (
        "gpu",
        lambda patch, tmp: on_a_gpu_host(patch, devices=False, tmp_path=tmp),
        ("error", "no GPU is handed", "docker run --gpus all"),
    ),
    "the driver does not answer": (
        "gpu",
        lambda patch, tmp: on_a_gpu_host(patch, smi=None, tmp_path=tmp),
        ("error", "Driver/library mismatch", "sudo reboot"),
    ),
    "the driver is too old": (
        "gpu",
        lambda patch, tmp: on_a_gpu_host(patch, smi="470.1", tmp_path=tmp),
        ("error", "driver 470.1 is too old", "pip install --force-reinstall torch"),
    ),
    "there is no GPU": (
        "gpu",
        lambda patch, tmp: (
            on_a_gpu_host(patch, present=False, tmp_path=tmp),
            patch.setattr(checks.shutil, "which", lambda _: None),
        ),
        ("warning", "on the CPU", "trainkit new smollm2-135m-lora-cpu"),
    ),
    "torch has no code for a new GPU": (
        "gpu",
        lambda patch, _: with_gpus(patch, capability=(12, 0)),
        ("error", "code for sm_80, sm_90 only", checks._TORCH),
    ),
    "torch has no code for an old GPU": (
        "gpu",
        lambda patch, _: with_gpus(patch, capability=(7, 0)),
        ("error", "code for sm_80, sm_90 only", checks._OLDER_TORCH),
    ),
    "another process has the GPU": (
        "gpu",
        lambda patch, _: with_gpus(patch, free=3),
        ("warning", "3 of 80 GiB free", "nvidia-smi"),
    ),
    "nvidia-smi is missing": (
        "driver",
        lambda patch, _: (with_gpus(patch), patch.setattr(checks.shutil, "which", lambda _: None)),
        ("warning", "nvidia-smi is not here", "docker run"),
    ),
    "GPUs do not reach each other": (
        "nccl",
        lambda patch, _: with_gpus(patch, 2, peers=False),
        ("warning", "0-1", "nvidia-smi topo -m"),
    ),
    "no compiler": (
        "compiler",
        lambda patch, _: (
            patch.delenv("CC", raising=False),
            patch.setattr(checks.shutil, "which", lambda _: None),
        ),
        ("warning", "cannot be compiled", "apt-get install"),
    ),
    "CC names nothing": (
        "compiler",
        lambda patch, _: patch.setenv("CC", "/nowhere/cc -m64"),
        ("error", "/nowhere/cc", "unset CC"),
    ),
    "the network between processes": (
        "all-reduce",
        lambda patch, _: (
            patch.setenv("GLOO_SOCKET_IFNAME", "nope0"),
            patch.setattr(checks.subprocess, "run", lambda *_, **__: NO_INTERFACE),
        ),
        ("error", "Unable to find address", "unset GLOO_SOCKET_IFNAME"),
    ),
    "processes never meet": (
        "all-reduce",
        lambda patch, _: patch.setattr(checks, "_REDUCE_SECONDS", 0.01),
        ("error", "did not finish", "GLOO_DEBUG=1 trainkit doctor"),
    ),
    "a full disk": (
        "disk",
        lambda patch, _: patch.setattr(shutil, "disk_usage", lambda _: Usage(9 * GIB, 0, 0)),
        ("warning", "0 GiB free", "export HF_HOME="),
    ),
    "a disk that is read only": (
        "disk",
        lambda patch, _: patch.setattr(checks.os, "access", lambda *_: False),
        ("error", "not writable", "export TRITON_CACHE_DIR="),
    ),
    "no shared memory": (
        "shared memory",
        lambda patch, _: patch.setattr(checks, "_SHM", Path("/none")),
        ("warning", "there is no", "sudo mkdir"),
    ),
    "docker's 64 MiB of shared memory": (
        "shared memory",
        lambda patch, _: patch.setattr(
            shutil, "disk_usage", lambda _: Usage(GIB // 16, 0, GIB // 16)
        ),
        ("warning", "0.1", "sudo mount -o remount"),
    ),
    "shared memory is full": (
        "shared memory",
        lambda patch, _: patch.setattr(shutil, "disk_usage", lambda _: Usage(9 * GIB, 0, 0)),
        ("warning", "0.0 of 9.0", "ls -lhS"),
    ),
    "few open files": (
        "limits",
        lambda patch, _: limit(patch, resource.RLIMIT_NOFILE, 1024, UNLIMITED),
        ("warning", "1024", "ulimit -n 65536"),
    ),
    "few open files for good": (
        "limits",
        lambda patch, _: limit(patch, resource.RLIMIT_NOFILE, 1024, 2048),
        ("warning", "1024", "echo '* - nofile 65536'"),
    ),
    "few processes": (
        "limits",
        lambda patch, _: limit(patch, resource.RLIMIT_NPROC, 512, 30_000),
        ("warning", "512", "ulimit -u 30000"),
    ),
    "locked memory with InfiniBand": (
        "limits",
        lambda patch, tmp: (
            (tmp / "mlx5_0").touch(),
            patch.setattr(checks, "_INFINIBAND", tmp),
            limit(patch, resource.RLIMIT_MEMLOCK, 65536, 65536),
        ),
        ("warning", "65536", "echo '* - memlock unlimited'"),
    ),
    "offline by choice": (
        "hub",
        lambda patch, _: patch.setenv("TRANSFORMERS_OFFLINE", "1"),
        ("warning", "TRANSFORMERS_OFFLINE is set", "unset TRANSFORMERS_OFFLINE"),
    ),
    "no network": (
        "hub",
        lambda patch, _: patch.setenv("HF_ENDPOINT", "http://127.0.0.1:9"),
        ("warning", "cannot be reached", "export HTTPS_PROXY="),
    ),
    "no address": (
        "hub",
        lambda patch, _: patch.setenv("HF_ENDPOINT", "mirror"),
        ("warning", "cannot be reached", "export HTTPS_PROXY="),
    ),
}

NO_INTERFACE = subprocess.CompletedProcess(
    [],
    1,
    "",
    "[rank0]: RuntimeError: [enforce fail at device.cc:111] Unable to find address for: nope0\n"
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n",
)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named_with_the_command_that_mends_it(fault, monkeypatch, tmp_path):
    check, breaks, (state, says, fix) = FAULTS[fault]
    for name in ("HF_HUB_OFFLINE", "HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    breaks(monkeypatch, tmp_path)
    every = list(CHECKS[check]())
    assert all((one.state == "ok") == (one.fix is None) for one in every)
    found = [one for one in every if one.state != "ok"]
    assert any(
        one.state == state and says in one.found and one.fix.startswith(fix) for one in found
    ), found


def test_every_check_has_a_fault_that_is_tried():
    assert {check for check, _, _ in FAULTS.values()} == CHECKS.keys()


@pytest.mark.parametrize(
    ("status", "token", "state", "says"),
    [
        (200, "hf_good", "ok", "a token is set"),
        (401, None, "ok", "no token"),
        (401, "hf_old", "warning", "refuses the token"),
        (503, None, "warning", "answers 503"),
        (407, None, "warning", "cannot be reached"),
    ],
)
def test_the_hub_or_its_mirror_is_asked(status, token, state, says, monkeypatch):
    class Mirror(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Mirror)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}/")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: token)
    (found,) = CHECKS["hub"]()
    server.shutdown()
    server.server_close()
    assert (found.state, says in found.found) == (state, True), found


def test_gpus_that_are_fit_are_ok(monkeypatch):
    with_gpus(monkeypatch, 2)
    with_ptx = ("sm_80", "compute_90")
    assert [found.state for found in CHECKS["gpu"]()] == ["ok", "ok"]
    assert [found.state for found in CHECKS["nccl"]()] == ["ok"]
    with_gpus(monkeypatch, capability=(12, 0), arches=with_ptx)
    assert [found.state for found in CHECKS["gpu"]()] == ["ok"]


def test_modules_that_are_compiled_once_are_fine(tmp_path, monkeypatch):
    keep_bytecode(monkeypatch, tmp_path, True)
    assert [found.state for found in checks.check_bytecode()] == ["ok"]
