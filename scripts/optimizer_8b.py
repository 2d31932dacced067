"""Full steps of Llama-3.1-8B's shape: the shipped recipe's parts, and a stand-in for torchtune's.

`optimizer_gpu.py` runs them. The stand-in is the technique of torchtune's single-device recipe from
plain transformers and bitsandbytes: PagedAdamW8bit in the backward pass, no masters, full
recompute, the loss in eight chunks of the sequence.
"""

import statistics
import tempfile
import time
from typing import Any

import torch
from torch.nn.functional import cross_entropy

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
