#!/usr/bin/env python3
"""The longest row of a LoRA step of an 8B on one GPU: trainkit, Liger and Unsloth, in one call.

    python scripts/longest_row_peers.py --output rows.jsonl [--peers FOLDER] [--seconds N]

A step over a row of 450,000 tokens takes ten minutes, nearly all of them attention, and says
nothing that a few layers do not. So each case has the first ``--layers`` of the model's layers, and
beside them what the others would hold: on the GPU their weights, adapters and optimizer states; for
each row their inputs, on the GPU or, where the case sends them there, written and held on the host.
Two short rows give what a token takes; the longest row that this has room for is then trained, with
a little less where it does not fit. trainkit runs with tiled loss, tiled feed-forward blocks and
inputs on the host, and says how often each was at work; Liger with Hugging Face's checkpointing,
and Unsloth with its own. One JSON row a case; weights and tokens are random. ``--layers 32
--gpu-gib 30`` computes all layers, for a check of the few.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

GIB = 2**30
CASES = tuple(
    (provider, mode)
    for mode in ("lora_checkpointed", "qlora_checkpointed")
    for provider in ("trainkit", "liger", "unsloth")
)
OFFLOADS = frozenset({"trainkit", "unsloth"})
"""Send the inputs of checkpointed layers to the host."""
LOSS_CHUNK, MLP_CHUNK = 4096, 8192
RANK = 16
RESERVE = 0.985
"""Of the GPU's memory: what allocated tensors get before the allocator has no block left."""
HOST_RESERVE_GIB = 5.0
SHORTER = 0.96
_LIMITS = ("layers", "most", "gpu_gib", "host_gib", "multiple")


class Step:
    """A model of a few layers, what the other layers would hold, and its step.

    Args:
        given: of a case: provider, mode, layers, shape, folder.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        import torch

        from trainkit.bench import lora
        from trainkit.bench.memory_points import SHAPES
        from trainkit.models.recompute.tiled import TiledMLP, tile

        self.torch, self.provider = torch, given["provider"]
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        shape = SHAPES["llama-3.1-8b"]
        length = max(given["most"], *given["short"])
        config = {**shape.config, "max_position_embeddings": length, **given["shape"]}
        layers = min(given["layers"], config["num_hidden_layers"])
        self.others, self.hidden = config["num_hidden_layers"] - layers, config["hidden_size"]
        self.vocabulary = config["vocab_size"]
        config["num_hidden_layers"] = layers
        shape = replace(
            shape, config=config, batch_size=1, length=config["max_position_embeddings"]
        )
        ours = self.provider == "trainkit"
        cell = lora.Cell(
            "llama-3.1-8b",
            self.provider,
            given["mode"],
            lora_rank=RANK,
            offload=ours,
            loss_chunk_tokens=given["loss_chunk"] if ours else None,
            folder=given["folder"],
            shape=shape,
        )
        if self.provider == "unsloth":
            lora.save_base(shape, cell.folder, self.device)
        self.model = lora.build_cell(cell, self.device).train()
        if ours:
            tile(self.model, given["mlp_chunk"])
        self.sent = _count_journeys()
        self.tiled = sum(isinstance(module, TiledMLP) for module in self.model.modules())
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-5)
        self.memory = _memory(self.device)
        self._hold_weights(layers)

    def _hold_weights(self, layers: int) -> None:
        """What the other layers hold on the GPU: weights, and 16 bytes for each trained number."""
        a_layer = 0
        for name, weight in self.model.named_parameters():
            if ".layers.0." in name:
                a_layer += weight.nbytes + 12 * weight.numel() * weight.requires_grad
                a_layer += _scales(getattr(weight, "quant_state", None))
        self.weights = self._empty(self.others * a_layer, self.device)
        self.held_gib = self.others * a_layer / GIB

    def _empty(self, size: int, device: Any) -> Any:
        return self.torch.empty(size, dtype=self.torch.uint8, device=device)

    def others_inputs(self, tokens: int) -> int:
        """Bytes of the inputs of the layers that are not here."""
        return self.others * tokens * self.hidden * 2

    def __call__(self, tokens: int, *, holds_host: bool) -> dict[str, Any]:
        """One step over a row.

        Args:
            tokens: of the row.
            holds_host: write and hold what the other layers would have on the host.
        """
        torch = self.torch
        ids = torch.randint(0, self.vocabulary, (1, tokens), device=self.device)
        place = None
        if self.provider not in OFFLOADS:
            place = self._empty(self.others_inputs(tokens), self.device)
        elif holds_host:
            place = self._empty(self.others_inputs(tokens), "cpu").fill_(1)
        started = time.perf_counter()
        self.memory.start()
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in self.model.parameters() if p.grad is not None]
        )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        found = {"tokens": tokens, "loss": loss.item(), "grad_norm": norm.item()}
        found["peak_memory_gib"] = self.memory.peak() / GIB
        found["host_held_gib"] = place.nbytes / GIB if holds_host and place is not None else 0.0
        found["sent_to_host"] = len(self.sent)
        self.sent.clear()
        del place, loss
        return {**found, "seconds": time.perf_counter() - started}


def _scales(state: Any) -> int:
    """Bytes of a packed weight's scales, which are no parameters."""
    if state is None:
        return 0
    nested = getattr(state, "state2", None)
    return int(state.absmax.nbytes) + (int(nested.absmax.nbytes) if nested is not None else 0)


def _memory(device: Any) -> Any:
    from trainkit.train.recompute.peaks import CountedMemory, GpuMemory

    return GpuMemory() if device.type == "cuda" else CountedMemory()


def _count_journeys() -> list[int]:
    """Grows by one for each tensor that trainkit sends to the host."""
    from trainkit.models.recompute.offload import Travel

    sent: list[int] = []
    plain = Travel.to_host

    def to_host(self: Travel, tensor: Any) -> Any:
        sent.append(tensor.nbytes)
        return plain(self, tensor)

    Travel.to_host = to_host  # type: ignore[method-assign]
    return sent


def _host_gib(wanted: float) -> float:
    """GiB of the host that tensors may take, by its control group where there is one.

    Args:
        wanted: GiB of another host, on which this process would be alone; 0 for this one.
    """
    import psutil

    whole = psutil.virtual_memory()
    has, taken = whole.total, whole.used
    group = Path("/sys/fs/cgroup")
    for limit, stat, key in (
        ("memory.max", "memory.stat", "anon"),
        ("memory/memory.limit_in_bytes", "memory/memory.stat", "total_rss"),
    ):
        if (group / limit).exists() and (text := (group / limit).read_text().strip()).isdecimal():
            held = dict(line.split() for line in (group / stat).read_text().splitlines())
            has, taken = min(has, int(text)), int(held[key])
    free = (has - taken) / GIB
    if wanted:
        free = min(free, wanted - psutil.Process().memory_info().rss / GIB)
    return free - HOST_RESERVE_GIB


def longest(given: dict[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """Train two short rows and the longest one that they leave room for."""
    import torch

    gpu = given["gpu_gib"]
    if torch.cuda.is_available():
        whole = torch.cuda.get_device_properties(0).total_memory / GIB
        gpu = min(gpu or whole, whole)
        torch.cuda.set_per_process_memory_fraction(gpu / whole)
    step, multiple = Step(given), given["multiple"]
    host, room = _host_gib(given["host_gib"]), gpu * RESERVE
    found: dict[str, Any] = {"gpu_gib": gpu, "held_weights_gib": step.held_gib}
    found |= {"host_gib": given["host_gib"] or None, "host_free_gib": host}
    found |= {"loss_chunk": given["loss_chunk"], "mlp_chunk": given["mlp_chunk"]}
    found |= {"tiled_blocks": step.tiled, "layers": given["layers"], "other_layers": step.others}
    first, second = (step(tokens, holds_host=False) for tokens in given["short"])
    say(f"short rows: {first['peak_memory_gib']:.2f}, {second['peak_memory_gib']:.2f} GiB")
    slope = (second["peak_memory_gib"] - first["peak_memory_gib"]) / (
        second["tokens"] - first["tokens"]
    )
    found["kib_per_token"] = slope * 2**20
    tokens = second["tokens"] + (room - second["peak_memory_gib"]) / slope
    found["by_gpu"] = int(tokens)
    if given["provider"] in OFFLOADS:
        all_layers = step.others + given["layers"]
        per_token = all_layers * step.hidden * 2 / GIB
        found["by_host"] = int(host / per_token)
        tokens = min(tokens, found["by_host"])
    tokens = min(tokens, given["most"])
    if tokens < multiple:
        return {**found, "error": f"no room: {host:.1f} GiB of the host, {room:.1f} of the GPU"}
    for _ in range(3):
        whole = int(tokens) // multiple * multiple
        if time.time() > given["until"]:
            return {**found, "error": f"no time left for {whole} tokens"}
        try:
            return {**found, "longest": whole, **step(whole, holds_host=True)}
        except torch.OutOfMemoryError:
            found.setdefault("too_long", []).append(whole)
            say(f"{whole} tokens do not fit")
        step.optimizer.zero_grad(set_to_none=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        tokens *= SHORTER
    return {**found, "error": "none of these lengths fits"}


def worker() -> None:
    """Import, wait for a case on stdin, write its row to stdout, last."""
    if os.environ.get("FIRST_IMPORT"):
        __import__(os.environ["FIRST_IMPORT"])
    import peft  # noqa: F401  (imported while other cases have the GPU)

    import trainkit.bench.lora  # noqa: F401

    given = json.loads(sys.stdin.readline())

    def say(text: str) -> None:
        sys.stderr.write(f"{given['provider']} {given['mode']}: {text}\n")

    try:
        row = longest(given, say)
    except Exception as error:  # whatever it is, it is this case's row
        row = {"error": f"{type(error).__name__}: {error}"[:600]}
    sys.stdout.write("\n" + json.dumps(row) + "\n")


def _start(provider: str, peers: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    if provider == "unsloth":
        paths = [path for path in (peers, os.environ.get("PYTHONPATH", "")) if path]
        environment |= {"FIRST_IMPORT": "unsloth", "PYTHONPATH": os.pathsep.join(paths)}
        environment |= {"HF_HUB_OFFLINE": "1", "UNSLOTH_DISABLE_STATISTICS": "1"}
    return subprocess.Popen(
        [sys.executable, __file__, "--worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def main() -> None:
    """All cases, one after another; all import at once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON lines are added here")
    parser.add_argument("--only", default="", help="words; a case has one of them in its name")
    parser.add_argument("--peers", default="", help="packages of Unsloth's process")
    parser.add_argument("--layers", type=int, default=3, help="that are computed")
    parser.add_argument("--seconds", type=float, default=270.0, help="begin no row after these")
    parser.add_argument("--most", type=int, default=524_288, help="tokens of a row")
    parser.add_argument("--short", default="16384,32768", help="tokens of the two short rows")
    parser.add_argument("--gpu-gib", type=float, default=0.0, help="instead of the GPU's own")
    parser.add_argument("--host-gib", type=float, default=0.0, help="a host of its own")
    parser.add_argument("--multiple", type=int, default=1024, help="of tokens")
    parser.add_argument("--shape", type=json.loads, default={}, help="of the model, instead")
    parser.add_argument("--chunks", default=f"{LOSS_CHUNK},{MLP_CHUNK}", help="of loss and blocks")
    chosen = parser.parse_args()
    from trainkit.bench.measure.record import environment

    until, words = time.time() + chosen.seconds, chosen.only.split(",")
    cases = [case for case in CASES if any(word in " ".join(case) for word in words)]
    waiting = [_start(provider, chosen.peers) for provider, _ in cases]
    loss_chunk, mlp_chunk = map(int, chosen.chunks.split(","))
    with tempfile.TemporaryDirectory() as scratch:
        for (provider, mode), process in zip(cases, waiting, strict=True):
            given = {
                "provider": provider,
                "mode": mode,
                "folder": str(Path(scratch, mode)),
                "short": [int(each) for each in chosen.short.split(",")],
                "until": until,
                "loss_chunk": loss_chunk,
                "mlp_chunk": mlp_chunk,
                **{key: getattr(chosen, key) for key in _LIMITS},
                "shape": chosen.shape,
            }
            output, _ = process.communicate(json.dumps(given) + "\n")
            lines = output.strip().splitlines()
            answer = json.loads(lines[-1]) if lines else {"error": f"exit {process.returncode}"}
            row = {"bench": "longest_row", "case": f"llama-3.1-8b {mode}", "provider": provider}
            row |= {**answer, **environment()}
            with chosen.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            told = row.get("longest") or row.get("error")
            sys.stdout.write(f"{provider} {mode}: {told} {row.get('seconds', 0):.0f} s\n")
            sys.stdout.flush()


if __name__ == "__main__":
    worker() if sys.argv[1:] == ["--worker"] else main()
