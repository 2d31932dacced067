"""A gated delta rule, the convolution before it, and a stack of hybrid layers, against peers.

One process measures one provider: transformers binds `fla` as soon as it can be imported. FLA
refuses the gated backward pass on Hopper with Triton 3.4 to 3.7.0; the tile that is miscompiled
there is not the one of heads of 128, so the guard is lifted.
"""

import argparse
import importlib.util
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from trainkit import kernels
from trainkit.bench.cells import append, environment

TOKENS = 8192
DOCUMENTS = (1, 4, 16)
KEY_HEADS, VALUE_HEADS, SIZE = 16, 32, 128
QWEN_4B = {
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 1024,
}


def milliseconds(function: Callable[[], object], turns: int = 12) -> float:
    """The median of events around a call, after two that compile."""
    times = []
    for _ in range(turns + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])


def both(function: Callable[..., Tensor], *leaves: Tensor) -> tuple[float, float]:
    """Milliseconds of a forward and of a backward pass."""
    output = function(*leaves)
    gradient = torch.randn_like(output)
    backward = milliseconds(
        lambda: torch.autograd.grad(output, leaves, gradient, retain_graph=True)
    )
    with torch.no_grad():
        forward = milliseconds(lambda: function(*leaves))
    return forward, backward


def inputs() -> tuple[Tensor, ...]:
    """q, k, v, g, beta of a layer of Qwen3.5-4B."""
    q, k, v = (
        torch.randn(TOKENS, heads, SIZE, device="cuda", dtype=torch.bfloat16)
        for heads in (KEY_HEADS, KEY_HEADS, VALUE_HEADS)
    )
    g = -torch.nn.functional.softplus(torch.randn(TOKENS, VALUE_HEADS, device="cuda") - 3)
    beta = torch.rand(TOKENS, VALUE_HEADS, device="cuda").to(torch.bfloat16)
    return tuple(each.requires_grad_() for each in (q, k, v, g, beta))


def rule_of(provider: str, bounds: Tensor) -> Callable[..., Tensor]:
    if provider == "trainkit":
        return lambda *given: kernels.gated_delta_rule(*given, bounds)
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    wide = bounds.long()

    def rule(*given: Tensor) -> Tensor:
        rows = (each[None] for each in given)
        o, _ = chunk_gated_delta_rule(*rows, cu_seqlens=wide, use_qk_l2norm_in_kernel=True)
        return o[0]

    return rule


def ops(provider: str, rows: Callable[..., None]) -> None:
    for number in DOCUMENTS:
        bounds = torch.arange(0, TOKENS + 1, TOKENS // number, device="cuda", dtype=torch.int32)
        times = both(rule_of(provider, bounds), *inputs())
        rows(f"gated_delta_rule, {number} documents of {TOKENS // number}", *times)
    if provider != "trainkit":
        return
    x = torch.randn(TOKENS, 2 * KEY_HEADS * SIZE + VALUE_HEADS * SIZE, device="cuda").bfloat16()
    weight = torch.randn(x.shape[1], 4, device="cuda", dtype=torch.bfloat16)
    rows(
        "causal_conv and silu, frozen weight",
        *both(lambda x: kernels.causal_conv(x, weight, bounds), x.requires_grad_()),
    )
    to, source = torch.empty_like(x), x.detach()
    copy = milliseconds(lambda: to.copy_(source))
    rows("copy of what the convolution reads and writes", copy, 1.5 * copy)


def stack(provider: str, rows: Callable[..., None]) -> None:
    """Four layers, every weight trained, no head; 8 documents of 1024, as rows where unpacked."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from trainkit import patch

    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_5_text", **QWEN_4B)
    with torch.device("cuda"):
        whole = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    x = torch.randn(8, 1024, 2560, device="cuda", dtype=torch.bfloat16)
    if provider == "trainkit":
        print(patch(whole))
    model = whole.model
    x.requires_grad_()

    def step() -> None:
        model(inputs_embeds=x, use_cache=False).last_hidden_state.float().square().mean().backward()
        whole.zero_grad()

    rows("qwen3.5-4b, 4 layers, 8 x 1024, full, forward + backward", milliseconds(step, 8))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("provider", choices=("trainkit", "fla", "transformers"))
    parser.add_argument("--output", required=True)
    parser.add_argument("--commit")
    arguments = parser.parse_args()
    if arguments.provider == "fla":
        importlib.import_module("fla.ops.common.chunk_o").TRITON_ABOVE_3_7_1 = True
    elif importlib.util.find_spec("fla") is not None:
        raise SystemExit("fla can be imported: transformers would use it")

    common = {"provider": arguments.provider, "unit": "ms", **environment(arguments.commit)}

    def rows(case: str, *times: float) -> None:
        metrics = ("forward", "backward") if len(times) == 2 else ("step",)
        found = [
            {"bench": "delta_rule", "case": case, "metric": metric, "value": value, **common}
            for metric, value in zip(metrics, times, strict=True)
        ]
        append(Path(arguments.output), found)

    if arguments.provider != "transformers":
        ops(arguments.provider, rows)
    stack(arguments.provider, rows)


if __name__ == "__main__":
    main()
