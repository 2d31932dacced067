"""Times of the ops against their peers, and the share of the memory's speed they reach.

Three clocks. ``autograd`` is what a user's training loop pays: events around the call, cold L2
cache, host time included where the GPU waits for it. ``kernel`` is the device's own time: a CUDA
graph of many calls over rotating inputs, so that nothing is found in the cache and no launch is
waited for. ``host`` is how long a forward call on a few rows keeps the host.

The provider ``copy`` is a plain copy of as many bytes as the op must move: over a few megabytes no
kernel reaches the speed of the long copy that shares are taken of.

M tokens, H hidden, F feed-forward, V vocabulary. A floor is the bytes a perfect kernel moves: each
input read once, each output written once.
"""

import functools
import itertools
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainkit.kernels.ops import OPS

TOKENS = 16384
LOSS_TOKENS = 8192
HOST_TOKENS = 64
"""So few that the GPU is done before the host is."""

VOCABULARY = 151936
SEQUENCE = 2048
HIDDEN = (896, 2048, 3584, 4096, 8192)
HEADS = ((14, 2, 64), (28, 4, 128), (32, 8, 128))
FEED_FORWARD = (4864, 14336, 18944)
PROVIDERS = ("trainkit", "eager", "torch_compile", "liger", "quack")


@dataclass(frozen=True)
class OpCell:
    """An op at one size.

    Args:
        op: the name in the registry.
        case: the size, as it is printed.
        inputs: makes the tensors, by parameter name.
        grads: the parameters that get gradients.
        forward_bytes: floor of the forward pass.
        backward_bytes: floor of the backward pass.
    """

    op: str
    case: str
    inputs: Callable[[], dict[str, Tensor]]
    grads: tuple[str, ...]
    forward_bytes: int
    backward_bytes: int


def normal(*shape: int) -> Tensor:
    """Random bf16 numbers on the GPU: constant data would flatter the clocks."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def cells(tokens: int = TOKENS) -> Iterator[OpCell]:
    """Every op at every size of the table, on this many rows (the loss on at most half)."""
    for op in ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm"):
        for hidden in HIDDEN:
            yield _norm_cell(op, tokens, hidden)
    for q_heads, k_heads, head_dim in HEADS:
        yield _rope_cell(tokens, q_heads, k_heads, head_dim)
    for op in ("swiglu", "swiglu_packed"):
        for width in FEED_FORWARD:
            yield _gated_cell(op, tokens, width)
    yield _loss_cell(min(tokens, LOSS_TOKENS))


def _norm_cell(op: str, tokens: int, hidden: int) -> OpCell:
    rows = ("x", "residual") if op.startswith("add_") else ("x",)
    vectors = ("weight", "bias") if op.endswith("layer_norm") else ("weight",)

    def inputs() -> dict[str, Tensor]:
        return {
            **{name: normal(tokens, hidden) for name in rows},
            **{name: normal(hidden) for name in vectors},
        }

    unit = 2 * tokens * hidden
    reads, passed = 2 * len(rows), 2 + len(rows)
    return OpCell(op, f"H={hidden}", inputs, rows + vectors, reads * unit, passed * unit)


def _rope_cell(tokens: int, q_heads: int, k_heads: int, head_dim: int) -> OpCell:
    length = min(SEQUENCE, tokens)
    batch = tokens // length

    def inputs() -> dict[str, Tensor]:
        angles = torch.randn(1, length, head_dim // 2, device="cuda")
        angles = torch.cat((angles, angles), dim=-1)
        return {
            "q": normal(batch, length, q_heads, head_dim).transpose(1, 2),
            "k": normal(batch, length, k_heads, head_dim).transpose(1, 2),
            "cos": angles.cos().bfloat16(),
            "sin": angles.sin().bfloat16(),
        }

    moved = 4 * tokens * (q_heads + k_heads) * head_dim
    return OpCell("apply_rope", f"{q_heads}/{k_heads}x{head_dim}", inputs, ("q", "k"), moved, moved)


def _gated_cell(op: str, tokens: int, width: int) -> OpCell:
    def inputs() -> dict[str, Tensor]:
        if op == "swiglu_packed":
            return {"gate_up": normal(tokens, 2 * width)}
        return {"gate": normal(tokens, width), "up": normal(tokens, width)}

    unit = 2 * tokens * width
    names = ("gate_up",) if op == "swiglu_packed" else ("gate", "up")
    return OpCell(op, f"F={width}", inputs, names, 3 * unit, 5 * unit)


def _loss_cell(tokens: int) -> OpCell:
    def inputs() -> dict[str, Tensor]:
        labels = torch.randint(VOCABULARY, (tokens,), device="cuda")
        return {"logits": normal(tokens, VOCABULARY), "labels": labels}

    unit = 2 * tokens * VOCABULARY
    # One read and one write make both; the passes are timed together.
    return OpCell("cross_entropy", f"V={VOCABULARY}", inputs, ("logits",), 2 * unit, 0)


def function_of(provider: str, op: str) -> Callable[..., Any] | None:
    """A provider's function with the op's parameters; None where it has none.

    Raises:
        ImportError: the provider is not installed.
    """
    if provider == "trainkit":
        return OPS[op].function
    if provider == "eager":
        return _eager_loss if op == "cross_entropy" else OPS[op].reference
    if provider == "torch_compile":
        from torch._functorch import config

        config.donated_buffer = False  # a graph is differentiated many times here
        eager = function_of("eager", op)
        return torch.compile(eager, dynamic=False) if eager is not None else None
    if provider == "liger":
        return _liger(op)
    if provider == "quack":
        return _quack(op)
    raise ValueError(f"no provider {provider!r}; there are {', '.join(PROVIDERS)}")


def _eager_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.float(), labels)


def _liger(op: str) -> Callable[..., Any] | None:
    if op == "rms_norm":
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        return lambda x, weight: LigerRMSNormFunction.apply(x, weight, 1e-6, 0.0, "llama", True)
    if op == "add_rms_norm":
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction as Fused

        return lambda x, residual, weight: Fused.apply(
            x, residual, weight, 1e-6, 0.0, "llama", True
        )
    if op == "layer_norm":
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction

        return lambda x, weight, bias: LigerLayerNormFunction.apply(x, weight, bias, 1e-5)
    if op == "apply_rope":
        from liger_kernel.ops.rope import LigerRopeFunction

        return LigerRopeFunction.apply
    if op in ("swiglu", "swiglu_packed"):
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        if op == "swiglu":
            return LigerSiLUMulFunction.apply
        return lambda gate_up: LigerSiLUMulFunction.apply(*gate_up.chunk(2, dim=-1))
    if op == "cross_entropy":
        from liger_kernel.transformers.functional import liger_cross_entropy

        # It overwrites the logits; a caller who needs them again must copy them.
        return lambda logits, labels: liger_cross_entropy(logits.clone(), labels)
    return None


def _quack(op: str) -> Callable[..., Any] | None:
    if op == "rms_norm":
        from quack.rmsnorm import rmsnorm

        return functools.partial(rmsnorm, eps=1e-6)
    if op == "add_rms_norm":
        from quack.rmsnorm import rmsnorm

        return lambda x, residual, weight: rmsnorm(
            x, weight, residual=residual, eps=1e-6, prenorm=True
        )
    if op == "cross_entropy":
        from quack.cross_entropy import cross_entropy

        return lambda logits, labels: cross_entropy(logits, labels, reduction="mean")
    return None


_ROTATE_BYTES = 400e6
"""Inputs of one graph together: several times the L2 cache of any GPU."""


def run(
    ops: Iterable[str], providers: Iterable[str], copy_gb_per_second: float
) -> Iterator[dict[str, Any]]:
    """Rows {op, case, provider, pass, clock, microseconds, share_of_copy}, as they come.

    Args:
        ops: names of the registry.
        providers: of `PROVIDERS`.
        copy_gb_per_second: of this run, bytes read and written.
    """
    chosen, names = set(ops), list(providers)
    for cell in cells():
        if cell.op not in chosen:
            continue
        for provider in names:
            rows = _provider_rows(cell, provider, copy_gb_per_second)
            yield from _or_error(rows, cell, provider)
        yield from _copy_rows(cell, copy_gb_per_second)
        torch.compiler.reset()
        torch.cuda.empty_cache()
    seen = set()
    for cell in cells(HOST_TOKENS):
        if cell.op in chosen and cell.op not in seen:
            seen.add(cell.op)
            for provider in names:
                yield from _or_error(_host_rows(cell, provider), cell, provider)


def _or_error(
    rows: Iterator[dict[str, Any]], cell: OpCell, provider: str
) -> Iterator[dict[str, Any]]:
    """The rows; a peer that fails must not end the run, so its row says why. Our own failure does.

    Peers are other people's code, and what they raise cannot be listed.
    """
    try:
        yield from rows
    except Exception:
        if provider == "trainkit":
            raise
        yield {**_place(cell, provider), "error": traceback.format_exc(limit=3)}


def _place(cell: OpCell, provider: str) -> dict[str, Any]:
    return {"op": cell.op, "case": cell.case, "provider": provider}


def _host_rows(cell: OpCell, provider: str) -> Iterator[dict[str, Any]]:
    function = function_of(provider, cell.op)
    if function is None:
        return
    times = {"microseconds": _on_host(_Call(cell, function).forward), "share_of_copy": None}
    yield {**_place(cell, provider), "pass": "forward", "clock": "host", **times}


def _on_host(function: Callable[[], Any], rounds: int = 30, calls: int = 100) -> float:
    """Microseconds until a call returns, of the fastest round: other work only adds to it."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(calls):
            function()
        times.append(1e6 * (time.perf_counter() - started) / calls)
    torch.cuda.synchronize()
    return min(times)


def _copy_rows(cell: OpCell, copy: float) -> Iterator[dict[str, Any]]:
    for direction, size in (("forward", cell.forward_bytes), ("backward", cell.backward_bytes)):
        if not 0 < size < _ROTATE_BYTES:  # a larger one is the long copy itself
            continue
        elements = size // 4  # of two bytes, read and written
        pairs = [(normal(elements), normal(elements)) for _ in range(_number_of_calls(size))]
        copies = [functools.partial(target.copy_, source) for target, source in pairs]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            times = {"autograd": _with_events(copies[0]), "kernel": _with_graph(copies)}
        torch.cuda.synchronize()
        for clock, microseconds in times.items():
            yield {
                **_place(cell, "copy"),
                "pass": direction,
                "clock": clock,
                "microseconds": microseconds,
                "share_of_copy": size / microseconds / 1e3 / copy,
            }


def _number_of_calls(size: int) -> int:
    """How many calls, each moving so many bytes, take turns."""
    return max(2, min(6, int(_ROTATE_BYTES / size) + 1))


def _provider_rows(cell: OpCell, provider: str, copy: float) -> Iterator[dict[str, Any]]:
    function = function_of(provider, cell.op)
    if function is None:
        return
    # Liger reads a count back to the host, which no graph can hold.
    host_syncs = (provider, cell.op) == ("liger", "cross_entropy")
    times = _time(cell, function, host_syncs=host_syncs)
    floors = {"forward": cell.forward_bytes, "backward": cell.backward_bytes}
    floors["both"] = cell.forward_bytes
    for (direction, clock), microseconds in times.items():
        yield {
            **_place(cell, provider),
            "pass": direction,
            "clock": clock,
            "microseconds": microseconds,
            "share_of_copy": floors[direction] / microseconds / 1e3 / copy,
        }


class _Call:
    """One set of inputs with a graph ready to be differentiated again and again."""

    def __init__(self, cell: OpCell, function: Callable[..., Any]) -> None:
        self._function = function
        tensors = cell.inputs()
        self._arguments = {
            name: tensor.requires_grad_(name in cell.grads) for name, tensor in tensors.items()
        }
        self._wanted = [self._arguments[name] for name in cell.grads]
        self._outputs: list[Tensor] = []
        self._incoming: list[Tensor] = []

    def forward(self) -> list[Tensor]:
        result = self._function(*self._arguments.values())
        return list(result) if isinstance(result, tuple | list) else [result]

    def prepare(self) -> None:
        self._outputs = self.forward()
        self._incoming = [torch.randn_like(output) for output in self._outputs]

    def backward(self) -> None:
        torch.autograd.grad(self._outputs, self._wanted, self._incoming, retain_graph=True)

    def both(self) -> None:
        torch.autograd.grad(self.forward(), self._wanted)


def _time(
    cell: OpCell, function: Callable[..., Any], *, host_syncs: bool
) -> dict[tuple[str, str], float]:
    number = _number_of_calls(cell.forward_bytes + cell.backward_bytes)
    if cell.op == "cross_entropy":  # its tensors do not fit the cache
        number = 1
    calls = [_Call(cell, function) for _ in range(number)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # autograd replays a node on the stream of its forward
        passes: dict[str, list[Callable[[], Any]]]
        if cell.op == "cross_entropy":
            passes = {"both": [call.both for call in calls]}
        else:
            for call in calls:
                call.prepare()
            passes = {
                "forward": [call.forward for call in calls],
                "backward": [call.backward for call in calls],
            }
        times = {}
        for direction, functions in passes.items():
            times[direction, "autograd"] = _with_events(functions[0])
            if not host_syncs:
                times[direction, "kernel"] = _with_graph(functions)
    torch.cuda.synchronize()
    return times


def _with_events(function: Callable[[], Any]) -> float:
    """Median microseconds with a cold cache."""
    from triton.testing import do_bench

    return 1e3 * do_bench(function, warmup=20, rep=100, return_mode="median")


def _with_graph(functions: Sequence[Callable[[], Any]], replays: int = 7) -> float:
    """Median microseconds of a call inside a graph of calls that take turns."""
    for function in functions:
        function()
    torch.cuda.synchronize()
    count = len(functions) * max(1, 12 // len(functions)) if len(functions) > 1 else 3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for function in itertools.islice(itertools.cycle(functions), count):
            function()
    times = []
    for _ in range(replays + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / count)
    return statistics.median(times[1:])
