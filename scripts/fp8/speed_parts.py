"""The parts of `speed.py`: each is a process with a GPU of its own while it runs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

NEITHER = (False, False)
Directions = dict[str, tuple[bool, bool]]

PARTS = {
    "7b full": ("qwen2-7b", "full", "trainkit"),
    "7b lora": ("qwen2-7b", "lora", "trainkit"),
    "7b kernels": ("qwen2-7b", "kernels", "trainkit"),
    "7b full liger": ("qwen2-7b", "full", "liger"),
    "7b lora unsloth": ("qwen2-7b", "lora", "unsloth"),
    "1b full": ("llama-3.2-1b", "full", "trainkit"),
    "0.5b full": ("qwen2-0.5b", "full", "trainkit"),
    "7b lora checkpointed": ("qwen2-7b", "lora_checkpointed", "trainkit"),
    "7b lora checkpointed unsloth": ("qwen2-7b", "lora_checkpointed", "unsloth"),
    "7b full torchao rowwise": ("qwen2-7b", "full", "rowwise"),
    "7b full torchao tensorwise": ("qwen2-7b", "full", "tensorwise"),
    "1b full torchao tensorwise": ("llama-3.2-1b", "full", "tensorwise"),
    "0.5b full torchao tensorwise": ("qwen2-0.5b", "full", "tensorwise"),
    "1b full torchao rowwise": ("llama-3.2-1b", "full", "rowwise"),
    "0.5b full torchao rowwise": ("qwen2-0.5b", "full", "rowwise"),
    "7b full torchao bf16": ("qwen2-7b", "full", "compiled"),
}
"""Shape, what is trained, and by whom; in the order in which they run."""

KINDS = {
    "quantise_and_transpose_ms": ("_quantize", "_column_", "_scales", "_transpose", "gate_codes"),
    "norms_and_gates_ms": ("_forward", "_backward", "_gate_rows", "gate_forward", "gate_backward"),
    "products_ms": ("nvjet", "gemm", "splitK", "cutlass"),
}
"""What the names of kernels contain, by kind, in the order in which they are tried. Those that
quantise only; norms and gates that give codes as well are in their own kind, next to bf16's."""


def size_of(shape: str, tiny: bool) -> Any:
    """A benchmark's shape, or a tiny one in its place."""
    from trainkit.bench.providers import MODELS, Shape

    size = MODELS[shape]
    if not tiny:
        return size
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "head_dim": 16}
    return Shape(size.family, {**size.config, **sizes, **heads}, 1, 64)


def random_model(size: Any, device: Any) -> Any:
    """A model of a shape with trainkit's attention, before its kernels."""
    from trainkit.bench.providers import build
    from trainkit.models import attention

    found = attention.resolve_attention(packed=False, device=device)
    model = build(size, device, found.name)
    attention.install(model, found.engine)
    return model


class KnownCosts:
    """What rounding costs in another model, for the layers at the same share of the depth.

    Stands in for trainkit's `Probe`, since random weights cannot be judged.
    """

    def __init__(self, record: Mapping[str, Any], depth: int) -> None:
        self._depth, self.loss, self.num_tokens = depth, record["loss"], record["num_tokens"]
        self._costs = {
            name: group["loss_increase"] / len(group["layers"])
            for group in record["groups"]
            for name in group["layers"]
        }
        alone = sum(each["loss_increase"] for each in record["groups"] if each["runs"] == "fp8")
        self._together = record["loss_increase"] / alone
        self._their_depth = 1 + max(map(place, self._costs))

    def increase(self, layers: Iterable[str]) -> Any:
        """As `Probe.increase`."""
        from trainkit.models.fp8.budget import Increase

        layers = list(layers)
        cost = sum(map(self._of, layers)) * self._their_depth / self._depth
        if len({name.rpartition(".")[2] for name in layers}) > 1:
            cost *= self._together
        return Increase(cost, cost)

    def _of(self, name: str) -> float:
        wanted = round(place(name) * (self._their_depth - 1) / max(self._depth - 1, 1))
        tail = name.partition(f".layers.{place(name)}.")[2]
        return self._costs[f"model.layers.{wanted}.{tail}"]


def place(layer: str) -> int:
    """A layer's depth, by its name."""
    return int(layer.split(".layers.")[1].split(".")[0])


def chosen(
    model: Any, size: Any, device: Any, costs: Mapping[str, Any], *, frozen: bool
) -> tuple[Directions, Directions]:
    """The directions of each layer that gain time, the output layer among them; and by budget."""
    from trainkit.models.fp8.choice import choose
    from trainkit.models.fp8.groups import find_candidates
    from trainkit.models.fp8.savings import measure_savings
    from trainkit.options import Fp8Options

    options = Fp8Options(loss_budget="all", head="fp8")
    candidates = find_candidates(model, options, frozen=frozen)
    tokens = size.batch_size * size.length
    savings, timing = measure_savings(
        candidates.layers, tokens, device, trained=not frozen, head=candidates.head
    )
    found = choose(candidates, options, savings, timing, None, frozen=frozen).directions
    gains = {name: found.get(name, NEITHER) for name in candidates.layers}
    if not costs:
        return gains, {}
    options = Fp8Options()
    candidates = find_candidates(model, options, frozen=frozen)
    probe: Any = KnownCosts(costs, size.config["num_hidden_layers"])
    choice = choose(candidates, options, savings, timing, probe, frozen=frozen)
    return gains, choice.directions


def policies(gains: Directions, default: Directions) -> dict[str, Directions]:
    """What runs how, by the name of the policy."""
    from trainkit.options import Fp8Options

    found: dict[str, Directions] = {
        "bf16": {},
        "all": {name: each for name, each in gains.items() if ".layers." in name},
        "all and head": gains,
        "every product, gaining or not": dict.fromkeys(gains, (True, True)),
    }
    if default:
        found[f"budget {Fp8Options().loss_budget}"] = default
    return {
        policy: {name: each for name, each in directions.items() if any(each)}
        for policy, directions in found.items()
    }


def measured(step: Callable[[], Any], device: Any, size: Any) -> dict[str, Any]:
    """Milliseconds, tokens per second and peak of a step; the loss of its first call."""
    from trainkit.bench.measure.ceilings import warm_up
    from trainkit.bench.measure.clock import peak_gib, timed

    loss = float(step())
    step()
    warm_up(step, seconds=2.0 if device.type == "cuda" else 0.0)
    milliseconds, _ = timed(step, 9 if device.type == "cuda" else 1, device)
    tokens = size.batch_size * size.length
    return {
        "ms": milliseconds,
        "tokens_per_second": tokens / milliseconds * 1e3,
        "peak_memory_gib": peak_gib(device) or 0.0,
        "loss": loss,
    }


def by_kernel(step: Callable[[], Any], device: Any) -> dict[str, Any]:
    """What quantising and transposing take of a step, and the time of every kernel."""
    from trainkit.bench.measure.kernel_times import kernel_times

    if device.type != "cuda":
        return {}
    times = kernel_times(step)
    found = dict.fromkeys(KINDS, 0.0)
    for name, ms in times.items():
        kinds = (kind for kind, words in KINDS.items() if any(word in name for word in words))
        if (kind := next(kinds, None)) is not None:
            found[kind] += ms
    largest = sorted(times.items(), key=lambda each: -each[1])[:60]
    return {**found, "kernels": {name[:120]: round(ms, 3) for name, ms in largest}}


def full_step(model: Any, size: Any, device: Any, call: Any = None) -> Callable[[], Any]:
    """Forward and backward."""
    import torch

    vocab = size.config["vocab_size"]
    tokens = torch.randint(0, vocab, (size.batch_size, size.length), device=device)

    def step() -> Any:
        loss = (call or model)(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def trainkit_full(size: Any, device: Any, costs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Full fine-tuning, policy by policy."""
    import trainkit
    from trainkit.models.fp8.trained import KeptCodes, swap_in
    from trainkit.models.fp8_rows import let_norms_quantize

    model = random_model(size, device)
    trainkit.patch(model)
    gains, default = chosen(model, size, device, costs, frozen=False)
    for policy, directions in policies(gains, default).items():
        swaps = swap_in(model, directions)
        let_norms_quantize(model)
        kept = KeptCodes(model)
        plain = full_step(model, size, device)

        def step(kept: Any = kept, plain: Any = plain) -> Any:
            kept.weights_changed()
            return plain()

        shares = share_of(directions, gains)
        yield {"policy": policy, **shares, **measured(step, device, size)}
        yield {"policy": policy, **by_kernel(step, device)}
        kept.stop()
        swaps.revert()


def share_of(directions: Directions, gains: Directions) -> dict[str, float]:
    """Of all layers, those that run forward and backward products in fp8."""
    forward, backward = (sum(each[i] for each in directions.values()) for i in range(2))
    return {"forward_share": forward / len(gains), "backward_share": backward / len(gains)}


def trainkit_lora(
    size: Any, device: Any, costs: Mapping[str, Any], checkpointed: bool
) -> Iterator[dict[str, Any]]:
    """Adapters with AdamW, policy by policy."""
    import torch

    import trainkit
    from trainkit.lora import LoraOptions, attach
    from trainkit.models.fp8.trained import swap_in
    from trainkit.models.fp8_linear import quantize_to_fp8
    from trainkit.models.recompute.layers import Recomputed, every

    model = random_model(size, device)
    gains, default = chosen(model, size, device, costs, frozen=True)
    del model
    gc.collect()
    for policy, directions in policies(gains, default).items():
        model = random_model(size, device)
        both = [name for name, each in directions.items() if all(each) and ".layers." in name]
        if both:
            others = [name for name, _ in model.named_modules() if name and name not in both]
            quantize_to_fp8(model, device, others)
        swap_in(model, {name: each for name, each in directions.items() if name not in both})
        adapted = attach(model, LoraOptions(r=16, alpha=32))
        trainkit.patch(adapted)
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            layers = Recomputed(model)
            layers.apply(every(len(layers.layers), 1, "offload"))
        adapted.train()
        trained = [weight for weight in adapted.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=device.type == "cuda")

        def step(optimizer: Any = optimizer, adapted: Any = adapted, size: Any = size) -> Any:
            return lora_step(adapted, optimizer, size, device)

        yield {"policy": policy, **share_of(directions, gains), **measured(step, device, size)}
        yield {"policy": policy, **by_kernel(step, device)}
        del model, adapted, trained, optimizer, step
        gc.collect()  # a model holds itself, in circles
        if device.type == "cuda":
            torch.cuda.empty_cache()


def lora_step(model: Any, optimizer: Any, size: Any, device: Any) -> Any:
    """One step under autocast, of the same tokens each time."""
    import torch

    generator = torch.Generator(device).manual_seed(1)
    shape = (size.batch_size, size.length)
    vocab = size.config["vocab_size"]
    tokens = torch.randint(0, vocab, shape, device=device, generator=generator)
    with torch.autocast(device.type, torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def peer(size: Any, device: Any, work: str, who: str, tiny: bool) -> Iterator[dict[str, Any]]:
    """One of the other tools."""
    import torch

    from trainkit.bench.providers import build, provide

    if who == "unsloth":
        from trainkit.bench import lora

        folder = Path("/tmp/fp8_speed_base")
        if not folder.exists():
            lora.save_base(size, folder, device)
            torch.cuda.empty_cache()
        cell = lora.Cell("qwen2-7b", "unsloth", work, offload=True, folder=str(folder))
        yield {"policy": "bf16", **lora.measure(cell, device)}
        return
    if who == "liger":
        provided = provide("liger", size, device)
        yield {"policy": "bf16", **measured(full_step(provided.model, size, device), device, size)}
        return
    model: Any = build(size, device, "sdpa")
    if device.type == "cuda":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model, rope=False, rms_norm=False, swiglu=False)
    if who != "compiled":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(
            model,
            config=Float8LinearConfig.from_recipe_name(who),
            module_filter_fn=lambda module, name: (
                isinstance(module, torch.nn.Linear) and "lm_head" not in name
            ),
        )
    if not tiny:
        for layer in model.model.layers:
            layer.compile()
    policy = "bf16" if who == "compiled" else f"float8 {who}"
    yield {"policy": policy, **measured(full_step(model, size, device), device, size)}


def run_part(name: str, costs: Mapping[str, Any], tiny: bool) -> Iterator[dict[str, Any]]:
    """The figures of a part."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape, work, who = PARTS[name]
    size = size_of(shape, tiny)
    if work == "kernels":
        from speed_kernels import kernels_alone

        yield from kernels_alone(size, device)
    elif who != "trainkit":
        yield from peer(size, device, work, who, tiny)
    elif work == "full":
        yield from trainkit_full(size, device, costs)
    else:
        yield from trainkit_lora(size, device, costs, work.endswith("checkpointed"))
