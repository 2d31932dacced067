"""Measure what of the optimizers needs a GPU to judge: flat_adamw, 8B in 18 GiB, gradient memory.

    python scripts/optimizer_gpu.py ROWS.jsonl [--only 8b flat reuse each] [--optim NAMES]
                                    [--seconds N] [--tiny]

A row is written as soon as it is measured, each in a process of its own. ``8b``: peak GiB and
tokens/s of full steps of Llama-3.1-8B's shape, 2 x 2048 tokens, random weights, of the shipped
recipe's parts and of torchtune's technique (`optimizer_8b.py`). ``flat``: milliseconds of clip,
step and clear at Qwen2.5-0.5B's shapes and at the 392 small tensors of a 7B LoRA, of torch's fused
AdamW, its for-loop AdamW and flat_adamw. ``reuse``: full steps of Qwen2-7B's shape with Lion, whose
one fp32 moment leaves room for it, as trainkit has them and with a second fp32 copy of all
gradients. ``each``: steps of Qwen2-0.5B's shape, 4 x 2048 tokens, with every optimizer or
those of ``--optim``. ``--one-process`` starts no other process: for times on a quiet host; peaks
are those of fresh processes.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from optimizer_8b import DEVICE, TINY, big, milliseconds, wait
from torch import nn

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
    "adamw_8bit", "muon", "lion_8bit", "apollo_adamw", "adafactor", "flat_adamw", "lion_32bit",
    "ademamix_8bit", "stable_adamw", "paged_adamw_8bit", "rmsprop", "sgd", "paged_adamw_32bit",
)  # fmt: skip
LAST = ("adamw_torch_8bit", "adamw_torch_4bit", "galore_adamw", "galore_adafactor")
"""What is measured first and last, in case that time ends: the last compile, or decompose."""


def points(names: list[str] | None) -> Iterator[memory_points.Point]:
    """Steps of Qwen2-0.5B with every optimizer there is, and with what replaces masters."""
    plain = memory_points.Point("qwen2-0.5b", "full", 4)
    if names:
        yield from (replace(plain, optim=name) for name in names)
        return
    same = {plain.optim, "adamw_torch", "adamw_bnb_8bit", "rmsprop_bnb", "paged_ademamix_32bit"}
    yield plain
    yield replace(plain, optim="paged_adamw_8bit", keeps_masters=False, in_backward=True)
    for name in dict.fromkeys([*FIRST, *(n for n in SERVED if n not in LAST), *LAST]):
        if name not in same and not OPTIMIZERS[name].name.startswith(("paged_lion", "rmsprop_bnb")):
            yield replace(plain, optim=name)
    for name in ("adamw_torch_fused", "paged_adamw_8bit", "adafactor"):
        yield replace(plain, optim=name, keeps_masters=False)
        if name != "paged_adamw_8bit":
            yield replace(plain, optim=name, keeps_masters=False, in_backward=True)


def each(point: memory_points.Point, tiny: bool) -> dict[str, Any]:
    """What a point's steps need and take."""
    if tiny:
        shape = memory.SHAPES[point.model]
        memory.SHAPES[point.model] = Shape(shape.family, {**shape.config, **TINY}, 1, 64)
        point = replace(point, length=64)
    return {"bench": "each", "case": point.name, **memory.row_of(point)}


def calls(
    wanted: set[str], steps: int, tiny: bool, optim: list[str] | None
) -> Iterator[tuple[Any, ...]]:
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
    if "each" in wanted:
        for point in points(optim):
            yield each, point, tiny


KINDS = ("8b", "flat", "reuse", "each")


def main() -> None:
    """Write the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--only", nargs="*", choices=KINDS, default=KINDS)
    parser.add_argument("--optim", nargs="*", help="of `each`, these alone")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin nothing after these")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to check the script")
    parser.add_argument("--one-process", action="store_true", help="for all rows")
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    listed = list(calls(set(given.only), given.steps, given.tiny, given.optim))
    number = 0 if given.one_process else len(listed)
    with given.rows.open("a", encoding="utf-8") as file, Fresh(number, memory.imports) as fresh:
        for function, *arguments in listed:
            left = end - time.monotonic()
            if left < 0:
                break
            if given.one_process:
                row = function(*arguments)
                gc.collect()
                torch.cuda.empty_cache()
            else:
                row = fresh.call(function, *arguments, seconds=min(left, 100.0))
            asked = [str(argument) for argument in arguments if isinstance(argument, str)]
            line = json.dumps({"asked": asked, **row, **environment()})
            file.write(line + "\n")
            file.flush()
            sys.stdout.write(line[:300] + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
