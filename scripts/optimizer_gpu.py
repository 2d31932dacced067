"""Measure what of the optimizers needs a GPU to judge: flat_adamw, 8B in 18 GiB, gradient memory.

    python scripts/optimizer_gpu.py ROWS.jsonl [--only 8b flat reuse each] [--seconds N] [--tiny]

A row is written as soon as it is measured, each in a process of its own. ``8b``: peak GiB and
tokens/s of full steps of Llama-3.1-8B's shape, 2 x 2048 tokens, random weights, of the shipped
recipe's parts and of a stand-in for torchtune's single-device recipe, its technique from plain
transformers and bitsandbytes: PagedAdamW8bit in the backward pass, no masters, full recompute, the
loss in eight chunks of the sequence. ``flat``: milliseconds of clip, step and clear at
Qwen2.5-0.5B's shapes and at the 392 small tensors of a 7B LoRA, of torch's fused AdamW, its
for-loop AdamW and flat_adamw. ``reuse``: full steps of Qwen2-7B's shape with Lion, whose one fp32
moment leaves room for it, as trainkit has them and with a second fp32 copy of all gradients.
``each``: steps of Qwen2-0.5B's shape, 4 x 2048 tokens, with every optimizer. ``--one-process``
starts no other process: for times on a quiet host; peaks are those of fresh processes.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from trainkit.bench import memory, memory_points
from trainkit.bench.measure.processes import Fresh
from trainkit.bench.measure.record import environment
from trainkit.bench.providers import Shape, build
from trainkit.options.optimizers import OPTIMIZERS, SERVED
from trainkit.train.optimizer.optim import MasterWeightOptimizer

H, F, LAYERS, RANK = 896, 4864, 24, 16
FULL = [
    (H, H),
    (H,),
    (128, H),
    (128,),
    (128, H),
    (128,),
    (H, H),
    (F, H),
    (F, H),
    (H, F),
    (H,),
    (H,),
]
WIDTHS = [
    (3584, 3584),
    (3584, 512),
    (3584, 512),
    (3584, 3584),
    (3584, 18944),
    (3584, 18944),
    (18944, 3584),
]
SHAPES = {
    "0.5b": [(151936, H), (H,)] + FULL * LAYERS,
    "7b lora": [s for i, o in WIDTHS * 28 for s in ((RANK, i), (o, RANK))],
    "tiny": [(8, 4), (4,)],
}
PROVIDERS = ("torch fused", "torch for-loop", "flat_adamw")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512,
}  # fmt: skip


def wait() -> None:
    """Until the GPU is done."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def milliseconds(call: Any, repeats: int = 20) -> float:
    """Median time of a call on the GPU."""
    times = []
    for _ in range(repeats + 5):
        wait()
        begun = time.perf_counter()
        call()
        wait()
        times.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(times[5:])


def flat(case: str, provider: str) -> dict[str, Any]:
    """Clip, step and clear of fp32 parameters, as a provider does it."""
    from trainkit.train.optimizer.flat import FlatAdamW

    parameters = [nn.Parameter(torch.randn(s, device=DEVICE)) for s in SHAPES[case]]
    if provider == "flat_adamw":
        all_in_one = FlatAdamW([{"params": parameters}], lr=1e-4)
        for hook in all_in_one._hooks:
            hook.remove()
        all_in_one._hooks.clear()

        def call() -> None:
            all_in_one.begin_micro_batch(nn.Module(), accumulates=False)
            all_in_one.clip(1.0)
            all_in_one.step()
            all_in_one.zero_grad()
    else:
        fused = provider == "torch fused"
        plain = torch.optim.AdamW(parameters, lr=1e-4, fused=fused, foreach=False)

        def call() -> None:
            nn.utils.clip_grad_norm_(parameters, 1.0, foreach=fused)
            plain.step()
            plain.zero_grad(set_to_none=False)

    for parameter in parameters:
        gradient = torch.randn_like(parameter)
        parameter.grad = gradient if parameter.grad is None else parameter.grad.copy_(gradient)
    numel = sum(p.numel() for p in parameters)
    found = {"tensors": len(parameters), "numel": numel, "milliseconds": milliseconds(call)}
    wait()
    begun = time.perf_counter()
    call()  # returns before the GPU is done
    found["host_milliseconds"] = 1e3 * (time.perf_counter() - begun)
    wait()
    return {"bench": "flat", "case": case, "provider": provider, **found}


def llama(tiny: bool) -> Any:
    """The 8B shape with random weights in bfloat16, on the GPU, checkpointed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
        use_cache=False,
    )  # fmt: skip
    if tiny:
        config.update(TINY)
    torch.set_default_dtype(torch.bfloat16)
    with DEVICE:
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def ours(model: Any) -> Any:
    """The shipped recipe's parts; what ends a step."""
    from transformers import TrainingArguments

    import trainkit
    from trainkit.models.loss.loss_head import LossOptions, configure
    from trainkit.models.recompute.layers import Recomputed, every
    from trainkit.train.optimizer.make import OptimizerPlan, make_optimizer

    trainkit.patch(model)
    configure(model, LossOptions(chunk_tokens=512, keeps_gradient=False))
    layers = Recomputed(model)
    layers.apply(every(len(layers.layers), 1, "offload"))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, optim="paged_adamw_8bit", learning_rate=1e-5, weight_decay=0.0,
            report_to="none", use_cpu=DEVICE.type == "cpu",
        )  # fmt: skip
    plan = OptimizerPlan(in_backward=True, keeps_masters=False)
    return make_optimizer(
        model, arguments, plan, decay_names=set(), engine_keeps_masters=False
    ).step


def torchtunes(model: Any) -> Any:
    """An optimizer for each weight that steps in the backward pass."""
    import bitsandbytes

    for parameter in model.parameters():
        own = bitsandbytes.optim.PagedAdamW8bit([parameter], lr=1e-5)

        def take(which: Any, own: Any = own) -> None:
            own.step()
            which.grad = None

        parameter.register_post_accumulate_grad_hook(take)
    return lambda: None


def chunked_loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """As torchtune's: logits of an eighth of the sequence at a time, their loss in fp32."""
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
    total = torch.zeros((), device=ids.device)
    for states, labels in zip(hidden.chunk(8, 1), ids[:, 1:].chunk(8, 1), strict=True):
        logits = model.lm_head(states).float().flatten(0, 1)
        total = total + cross_entropy(logits, labels.flatten(), reduction="sum")
    return total / ids[:, 1:].numel()


def phases(forward: Any, end: Any, model: Any) -> dict[str, Any]:
    """Where a step's time goes: forward, with the backward pass, with updates; and its kernels.

    The backward pass alone is taken by letting go of gradients as they arrive.
    """

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    found: dict[str, Any] = {"forward": milliseconds(lambda: forward().detach(), 3)}
    found["step"] = milliseconds(lambda: (forward().backward(), end()), 3)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if DEVICE.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        forward().backward()
        end()
        wait()
    totals = profiler.key_averages()
    on_device = sorted(totals, key=lambda each: -each.self_device_time_total)[:40]
    found["on_device"] = {e.key[:90]: [e.self_device_time_total / 1e3, e.count] for e in on_device}
    on_host = sorted(totals, key=lambda each: -each.self_cpu_time_total)[:25]
    found["on_host"] = {e.key[:90]: [e.self_cpu_time_total / 1e3, e.count] for e in on_host}
    for parameter in model.parameters():
        parameter._post_accumulate_grad_hooks = None
        parameter.register_post_accumulate_grad_hook(drop)
    found["forward and backward"] = milliseconds(lambda: forward().backward(), 3)
    return found


def big(provider: str, steps: int, tiny: bool) -> dict[str, Any]:
    """Peak memory and speed of full steps at 8B."""
    model = llama(tiny)
    end = ours(model) if provider == "trainkit" else torchtunes(model)
    generator = torch.Generator(DEVICE).manual_seed(1)
    size = (2, 2048) if not tiny else (2, 64)
    ids = torch.randint(model.config.vocab_size, size, device=DEVICE, generator=generator)
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()

    def forward() -> torch.Tensor:
        if provider == "trainkit":
            loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
            return loss
        return chunked_loss(model, ids)

    times, losses = [], []
    for _ in range(steps):
        wait()
        begun = time.perf_counter()
        loss = forward()
        loss.backward()
        end()
        wait()
        times.append(time.perf_counter() - begun)
        losses.append(loss.detach())
    row = {
        "bench": "8b", "provider": provider, "losses": torch.stack(losses).tolist(),
        "seconds": times, "tokens_per_second": ids.numel() / statistics.median(times[2:]),
    }  # fmt: skip
    row |= {"milliseconds": phases(forward, end, model)}
    if DEVICE.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        row |= {
            "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
            "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
            "with_pages_gib": (total - free) / 2**30,
        }
    return row


class SecondCopy(MasterWeightOptimizer):
    """Sums gradients in fp32, and has the optimizer step with a copy of the sums."""

    def __init__(self, *args: Any, **more: Any) -> None:
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        super().__init__(*args, **more)

    def _add_gradient(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        if parameter not in self._sums:
            self._sums[parameter] = torch.zeros_like(parameter, dtype=torch.float32)
        self._sums[parameter].add_(gradient)

    @torch.no_grad()
    def step(self, closure: Any = None) -> float | None:  # type: ignore[override]
        """Copy the sums, step, and begin them anew."""
        self.gather_gradients()
        for parameter, total in self._sums.items():
            self._masters[parameter].grad = total.clone()
        found = super().step(closure)
        for total in self._sums.values():
            total.zero_()
        return found


def reuse(way: str, steps: int, tiny: bool) -> dict[str, Any]:
    """Full steps at 7B with fp32 gradients once or twice."""
    import bitsandbytes

    import trainkit

    shape = memory_points.SHAPES["qwen2-7b"]
    if tiny:
        shape = Shape("qwen2", {**shape.config, **TINY}, 1, 64)
    model: Any = build(shape, DEVICE, "sdpa")
    trainkit.patch(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    kind = SecondCopy if way == "second copy" else MasterWeightOptimizer
    optimizer = kind(
        [{"params": list(model.parameters())}],
        lambda groups: bitsandbytes.optim.Lion(groups, lr=1e-5, optim_bits=32),
    )
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    generator = torch.Generator(DEVICE).manual_seed(1)
    length, vocab = min(shape.length, 1024), shape.config["vocab_size"]
    losses, times = [], []
    for _ in range(steps):
        ids = torch.randint(vocab, (1, length), device=DEVICE, generator=generator)
        wait()
        begun = time.perf_counter()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        wait()
        times.append(time.perf_counter() - begun)
    row = {"bench": "reuse", "way": way, "losses": torch.stack(losses).tolist()}
    row["seconds"] = statistics.median(times[2:])
    if DEVICE.type == "cuda":
        row["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return row


FIRST = (
    "flat_adamw", "adamw_8bit", "adafactor", "muon", "lion_8bit", "galore_adamw",
    "apollo_adamw", "ademamix_8bit", "stable_adamw", "lion_32bit", "adamw_torch_8bit",
    "adamw_torch_4bit",
)  # fmt: skip
"""What is measured first, in case that time ends."""


def points() -> Iterator[memory_points.Point]:
    """Steps of Qwen2-0.5B with every optimizer there is, and with what replaces masters."""
    plain = memory_points.Point("qwen2-0.5b", "full", 4)
    same = {plain.optim, "adamw_torch", "adamw_bnb_8bit", "rmsprop_bnb", "paged_ademamix_32bit"}
    yield plain
    yield replace(plain, optim="paged_adamw_8bit", keeps_masters=False, in_backward=True)
    for name in dict.fromkeys([*FIRST, *SERVED]):
        if name not in same and not OPTIMIZERS[name].name.startswith(("paged_lion", "rmsprop_bnb")):
            yield replace(plain, optim=name)
    for name in ("adamw_torch_fused", "paged_adamw_8bit", "adafactor"):
        yield replace(plain, optim=name, keeps_masters=False)
        if name != "paged_adamw_8bit":
            yield replace(plain, optim=name, keeps_masters=False, in_backward=True)


def calls(wanted: set[str], steps: int, tiny: bool) -> Iterator[tuple[Any, ...]]:
    """A function and its arguments for each row."""
    if "8b" in wanted:
        for provider in ("trainkit", "torchtune's technique"):
            yield big, provider, steps, tiny
    if "flat" in wanted:
        for case in ("tiny",) if tiny else ("0.5b", "7b lora"):
            for provider in PROVIDERS:
                yield flat, case, provider
    if "reuse" in wanted:
        for way in ("trainkit", "second copy"):
            yield reuse, way, 2 * steps, tiny
    if "each" in wanted and not tiny:
        for point in points():
            yield memory.row_of, point


KINDS = ("8b", "flat", "reuse", "each")


def main() -> None:
    """Write the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--only", nargs="*", choices=KINDS, default=KINDS)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin nothing after these")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to check the script")
    parser.add_argument("--one-process", action="store_true", help="for all rows")
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    listed = list(calls(set(given.only), given.steps, given.tiny))
    number = 0 if given.one_process else len(listed)
    with given.rows.open("a", encoding="utf-8") as file, Fresh(number, memory.imports) as each:
        for function, *arguments in listed:
            left = end - time.monotonic()
            if left < 0:
                break
            if given.one_process:
                row = function(*arguments)
                gc.collect()
                torch.cuda.empty_cache()
            else:
                row = each.call(function, *arguments, seconds=min(left, 100.0))
            if function is memory.row_of:
                row = {"bench": "each", "case": arguments[0].name, **row}
            asked = [str(argument) for argument in arguments if isinstance(argument, str)]
            line = json.dumps({"asked": asked, **row, **environment()})
            file.write(line + "\n")
            file.flush()
            sys.stdout.write(line[:300] + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
