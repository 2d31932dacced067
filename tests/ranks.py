"""Run a function on several gloo ranks without paying the imports for every case.

A server process imports torch, transformers, DeepSpeed, peft and trainkit once and forks the ranks
of each case from there; the test process itself is never forked, so its threads and its torch state
do not matter. A case is a function at the top of a module under ``tests`` that takes plain
arguments and returns JSON values::

    results = run_ranks("distributed.zero_cases:train", world_size=2, stage=3)
"""

import atexit
import contextlib
import importlib
import itertools
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

TESTS = Path(__file__).parent
_servers = {}


class RankFailure(AssertionError):
    """A rank raised, died or did not come back in time."""


def run_ranks(case, *, world_size=2, timeout=120, interpret=False, **arguments):
    """The ranks' results in order; ``interpret`` runs the cases under TRITON_INTERPRET=1."""
    server = _servers.get(interpret)
    if server is None or server.poll() is not None:
        server = _servers[interpret] = _start(interpret)
    request = {"case": case, "world_size": world_size, "timeout": timeout, "arguments": arguments}
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    ready, _, _ = select.select([server.stdout], [], [], timeout + 60)  # 60 s: the first imports
    if not ready:
        server.kill()
        raise RankFailure(f"{case}: no answer in {timeout + 60} s")
    answer = json.loads(server.stdout.readline() or '[{"error": "the server died"}]')
    failures = [
        f"rank {rank}: {result['error']}" for rank, result in enumerate(answer) if "error" in result
    ]
    if failures:
        raise RankFailure(f"{case}:\n" + "\n".join(failures))
    return [result["value"] for result in answer]


def _start(interpret):
    extensions = tempfile.mkdtemp(prefix="extensions-")
    atexit.register(shutil.rmtree, extensions, ignore_errors=True)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_EXTENSIONS_DIR": extensions,
        "TRITON_INTERPRET": "1" if interpret else "0",
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
    }
    server = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    atexit.register(server.kill)
    return server


def _serve():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what ranks print must not look like an answer
    import gc

    gc.disable()
    import deepspeed
    import matplotlib.figure  # noqa: F401
    import torch
    from forks import give_forks_their_own_threads

    import trainkit.cli.commands.sft
    import trainkit.train.build  # noqa: F401

    torch.set_num_threads(1)
    give_forks_their_own_threads()
    _warm()
    # Processes are killed here, and no machine: what a disk does not have yet is not lost.
    os.fsync = lambda descriptor: None
    gc.freeze(), gc.enable()  # what is imported stays: no collection walks over it, or copies it
    # Its C++ build takes a minute; gloo gives the same sums.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    ports = _ports()
    for line in sys.stdin:
        answers.write(json.dumps(_run_case(json.loads(line), next(ports))) + "\n")
        answers.flush()


def _warm():
    """What every case would import or compute anew, and the same: its process begins with it."""
    import commands  # noqa: F401
    import deepspeed.module_inject.auto_ep_layer
    import deepspeed.runtime.superoffload.superoffload_stage3
    import deepspeed.runtime.zero.muon.muon_optimizer  # compiles, which loads a table of torch's
    import deepspeed.utils.numa
    import peft.tuners.lora.bnb
    import peft.utils.transformers_weight_conversion  # noqa: F401
    import torch.utils.serialization.config
    import transformers.models.auto.processing_auto
    from tiny import make_tokenizer
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    with contextlib.suppress(ImportError):  # of torch 2.13, and of the newest typer
        import torch.profiler._cupti_monitor
        import typer._adapters
        import typer._click.decorators  # noqa: F401
    from trainkit.lora.adapter import attach
    from trainkit.lora.read_weights import read_weights
    from trainkit.options.model import LoraOptions
    from trainkit.recipe.keys import key_references
    from trainkit.run import environment, report, starts, status
    from trainkit.train.resume.surroundings import code_digest, versions

    for file in sorted((TESTS.parent / "trainkit").rglob("[!_]*.py")):
        parts = file.relative_to(TESTS.parent).with_suffix("").parts
        if parts[1] not in ("bench", "replace_kernel", "started"):  # they act at once
            importlib.import_module(".".join(parts))
    get_checkpoint_conversion_mapping("llama")  # the first call compiles a thousand patterns
    code_digest(), versions(()), key_references(), status._shape(), starts._shape()
    report.parts(), report.parts("model_card.md")
    make_tokenizer().apply_chat_template([{"role": "user", "content": "a"}])
    for family in ("llama", "qwen2"):
        with torch.device("meta"), torch.no_grad():
            config = transformers.AutoConfig.for_model(family, num_hidden_layers=1)
            model = transformers.AutoModelForCausalLM.from_config(config)
            read_weights(model)
            attach(model, LoraOptions())(input_ids=torch.arange(8)[None])
    packages = environment._packages()
    environment._packages = lambda: packages
    # DeepSpeed's CPU accelerator starts a program for each bucket of gradients to count its nodes.
    cores = deepspeed.utils.numa.get_numa_cores()
    deepspeed.utils.numa.get_numa_cores = lambda: cores


def _ports():
    """Free ports, each once.

    They are below those that the system hands out, and each of pytest-xdist's workers has a range
    of its own: what is free when it is probed is still free when rank 0 binds it.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = 10_000 + 2_000 * (worker % 10) + os.getpid() % 1_000
    for port in itertools.cycle(range(first, first + 1_000)):
        with socket.socket() as probe:
            is_free = probe.connect_ex(("127.0.0.1", port)) != 0
        if is_free:
            yield port


def _run_case(request, port):
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"rank{rank}.json") for rank in range(request["world_size"])]
        pids = [_fork(request, rank, port, file) for rank, file in enumerate(files)]
        deadline = time.monotonic() + request["timeout"]
        waiting = set(pids)
        while waiting and time.monotonic() < deadline:
            for pid in list(waiting):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    waiting.discard(pid)
            time.sleep(0.005)
        for pid in waiting:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        return [
            json.loads(file.read_text()) if file.exists() else {"error": "killed or out of time"}
            for file in files
        ]


def _fork(request, rank, port, file):
    pid = os.fork()
    if pid:
        return pid
    world_size = str(request["world_size"])
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=world_size,
        LOCAL_WORLD_SIZE=world_size,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK_FOLDER=str(file.parent),  # for what a case leaves beside its result
    )
    try:
        module, _, name = request["case"].partition(":")
        value = getattr(importlib.import_module(module), name)(**request["arguments"])
        result = {"value": value}
    except BaseException:
        result = {"error": traceback.format_exc()[-3000:]}
    partial = file.with_suffix(".tmp")
    partial.write_text(json.dumps(result))
    partial.rename(file)
    with contextlib.suppress(Exception):
        import torch

        torch.distributed.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    _serve()
