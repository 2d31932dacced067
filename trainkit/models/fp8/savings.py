"""How many milliseconds fp8 saves in a layer: measured on a GPU, modelled elsewhere.

Layers that read the same input are timed together, as they run: its rows are quantised once for all
of them, and dx is one product. So are the layers of a feed-forward block that trains, which in fp8
are one function, and the output layer with its loss. A layer's part of what they save is its part
of the products.

The GPU's own time counts, since in training the host runs ahead of it. Whether it does is a matter
of the whole step and not of a layer: only where all layers together take the host longer than the
GPU, as with few tokens, is it the host's time that counts, for all of them.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainkit.kernels import linear_cross_entropy, swiglu
from trainkit.kernels.fp8.feed_forward import fp8_feed_forward
from trainkit.kernels.fp8.function import fp8_matmul, fp8_quantize
from trainkit.kernels.fp8.trained import Codes, Directions, fp8_linears, quantize_weight

MODELLED = "modelled: products at an H200's rates, 0.66 PFLOP/s in bf16 and 1.29 in fp8"
MEASURED = "measured here, layers of one input together"
MEASURED_BY_HOST = "measured here by the host's clock: it takes longer than the GPU"
_BF16_FLOPS = 0.66e15
_FP8_FLOPS = 1.29e15

MAX_TOKENS = 16384
"""Tokens that are timed; more take proportionally longer."""
MAX_NUMBERS = 2**29
"""Outputs that are timed: 1 GiB in bf16. A vocabulary is wide."""
MAX_HEAD_TOKENS = 4096
"""Of the output layer with its loss, which takes its time."""
_REPEATS = 3
_CALLS = 8
"""In a row."""
_WAITING_CYCLES = 30_000_000
"""Of the GPU: about 17 ms, longer than a host takes to start the calls; doubled where it is not."""
_LONGEST_WAITS = 4
"""Times that it is doubled at most: a quarter of a second."""

TOGETHER = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})
"""Roles of layers that read the same input."""

BLOCK = ("gate_proj", "up_proj", "down_proj")
"""Roles of the layers of a feed-forward block."""


@dataclass(frozen=True)
class Saving:
    """Milliseconds that fp8 saves in a layer and a micro-batch; negative where it loses.

    Attributes:
        backward: in dx, and dW where the weight is trained.
    """

    forward: float
    backward: float


@dataclass(frozen=True)
class Took:
    """Milliseconds of a call: of the GPU, and of the host's own processor."""

    gpu: float
    host: float


@dataclass(frozen=True)
class Timed:
    """Calls that do the same, in 16 bits and in fp8."""

    plain: Took
    fp8: Took

    def saved(self, by_host: bool) -> float:
        """Milliseconds, by one of the clocks."""
        clock = "host" if by_host else "gpu"
        saved: float = getattr(self.plain, clock) - getattr(self.fp8, clock)
        return saved


Both = tuple[Timed, Timed]
"""The forward and the backward products of layers that are timed together."""

Shape = tuple[tuple[int, ...], int]
"""Of layers that read the same input: their outputs, and its width."""


def measure_savings(
    layers: Mapping[str, nn.Linear],
    num_tokens: int,
    device: torch.device,
    *,
    trained: bool,
    head: str = "",
) -> tuple[Mapping[str, Saving], str]:
    """What fp8 saves in each layer, and how that is known.

    The head's weight gradient is never a product in fp8.
    """
    if device.type != "cuda":
        return {
            name: _modelled(
                (each.out_features, each.in_features), num_tokens, trained and name != head
            )
            for name, each in layers.items()
        }, MODELLED
    known: dict[Shape, Both] = {}
    parts: dict[str, _Part] = {}
    for names in blocks(layers) if trained else ():
        width, hidden = layers[names[0]].weight.shape
        timed = max(16, min(num_tokens, MAX_TOKENS) // 16 * 16)
        shape: Shape = (width, width, hidden), hidden
        if shape not in known:
            known[shape] = _measured_block(width, hidden, timed, device)
        each = _Part(known[shape], 1 / len(names), num_tokens / timed)
        parts.update(dict.fromkeys(names, each))
    alone = {name: layer for name, layer in layers.items() if name not in parts}
    for names in readers(alone):
        outputs = tuple(layers[name].out_features for name in names)
        shape = (outputs, layers[names[0]].in_features)
        most = min(num_tokens, MAX_TOKENS, MAX_NUMBERS // sum(outputs))
        timed = max(16, most // 16 * 16)
        if names == (head,):
            timed = min(timed, MAX_HEAD_TOKENS)
        if shape not in known:
            known[shape] = (
                _measured_head(layers[head], timed, device, trained)
                if names == (head,)
                else _measured(shape, timed, device, trained)
            )
        for name, output in zip(names, outputs, strict=True):
            parts[name] = _Part(known[shape], output / sum(outputs), num_tokens / timed)
    by_host = _waits_for_host(parts.values())
    savings = {name: part.saving(by_host) for name, part in parts.items()}
    return savings, MEASURED_BY_HOST if by_host else MEASURED


@dataclass(frozen=True)
class _Part:
    """A layer's part of what it is timed with.

    Attributes:
        times: as many tokens as were timed. The host starts as many kernels for more.
    """

    timed: Both
    share: float
    times: float

    def saving(self, by_host: bool) -> Saving:
        part = self.share * (1.0 if by_host else self.times)
        # What a clock can tell; so that two starts seldom choose differently.
        return Saving(*(float(f"{each.saved(by_host) * part:.2g}") for each in self.timed))


def _waits_for_host(parts: Iterable[_Part]) -> bool:
    """Whether all layers in fp8 would take longer than in 16 bits: the host, or the GPU."""
    host, gpu = {"plain": 0.0, "fp8": 0.0}, {"plain": 0.0, "fp8": 0.0}
    for part in parts:
        for timed in part.timed:
            for name in host:
                took = getattr(timed, name)
                host[name] += took.host * part.share
                gpu[name] += took.gpu * part.share * part.times
    if host["fp8"] <= gpu["fp8"]:
        return False
    return host["fp8"] >= max(host["plain"], gpu["plain"])


def readers(layers: Mapping[str, nn.Linear]) -> Sequence[tuple[str, ...]]:
    """The names of layers that read the same input, set by set."""
    found: dict[tuple[object, ...], list[str]] = {}
    for name, layer in layers.items():
        parent, _, role = name.rpartition(".")
        which = next((place for place, roles in enumerate(TOGETHER) if role in roles), name)
        found.setdefault((parent, which, layer.in_features), []).append(name)
    return [tuple(names) for names in found.values()]


def blocks(layers: Mapping[str, nn.Linear]) -> Sequence[tuple[str, ...]]:
    """The names of gate, up and down of each feed-forward block that fp8 runs as one function."""
    parents = dict.fromkeys(name.rpartition(".")[0] for name in layers)
    found = (tuple(f"{parent}.{role}" for role in BLOCK) for parent in parents)
    return [
        names
        for names in found
        if all(name in layers for name in names)
        and not any(layers[n].bias is not None for n in names[:2])
    ]


def _modelled(shape: tuple[int, int], num_tokens: int, trained: bool) -> Saving:
    flops = 2.0 * shape[0] * shape[1] * num_tokens
    one = flops * (1 / _BF16_FLOPS - 1 / _FP8_FLOPS) * 1e3
    return Saving(one, one * (2 if trained else 1))


def _measured(shape: Shape, num_tokens: int, device: torch.device, trained: bool) -> Both:
    generator = torch.Generator(device).manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device).bfloat16()

    outputs, width = shape
    x, dys = random(num_tokens, width), [random(num_tokens, output) for output in outputs]
    weights = [random(output, width).requires_grad_(trained) for output in outputs]
    made = [fp8_quantize(weight.detach()) for weight in weights]
    # What trains keeps its codes for a step; a base that keeps its 16 bits makes them each time.
    both = [Directions(True, True, _keeping(own) if trained else fp8_quantize) for own in made]
    ys = fp8_linears(x.requires_grad_(), weights, [None] * len(outputs), both)
    inputs = [x, *weights] if trained else [x]
    plain = [weight.detach() for weight in weights]
    rows = x.detach()

    def forward() -> None:
        codes, scales = fp8_quantize(rows, keep_largest=True)
        for own in made:
            fp8_matmul(codes, scales, *own)

    def forward_in_bf16() -> None:
        for weight in plain:
            functional.linear(rows, weight)

    def backward() -> None:
        torch.autograd.grad(ys, inputs, dys, retain_graph=True)

    def backward_in_bf16() -> None:
        dx = torch.mm(dys[0], plain[0])
        for dy, weight in zip(dys[1:], plain[1:], strict=True):
            dx.addmm_(dy, weight)
        if trained:
            for dy in dys:
                torch.mm(dy.t(), rows)

    return (
        Timed(_took(forward_in_bf16), _took(forward)),
        Timed(_took(backward_in_bf16), _took(backward)),
    )


def _measured_block(width: int, hidden: int, num_tokens: int, device: torch.device) -> Both:
    generator = torch.Generator(device).manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device).bfloat16()

    x, dy = random(num_tokens, hidden).requires_grad_(), random(num_tokens, hidden)
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    weights = [(random(*shape) / shape[1] ** 0.5).requires_grad_() for shape in shapes]
    both = [Directions(True, True, _keeping(fp8_quantize(each.detach()))) for each in weights]

    def forward() -> Tensor:
        return fp8_feed_forward(x, weights, None, both)

    def forward_in_bf16() -> Tensor:
        gate, up = functional.linear(x, weights[0]), functional.linear(x, weights[1])
        return functional.linear(swiglu(gate, up), weights[2])

    y, plain = forward(), forward_in_bf16()

    def backward() -> None:
        torch.autograd.grad(y, [x, *weights], dy, retain_graph=True)

    def backward_in_bf16() -> None:
        torch.autograd.grad(plain, [x, *weights], dy, retain_graph=True)

    return (
        Timed(_took(forward_in_bf16), _took(forward)),
        Timed(_took(backward_in_bf16), _took(backward)),
    )


def _measured_head(head: nn.Linear, num_tokens: int, device: torch.device, trained: bool) -> Both:
    generator = torch.Generator(device).manual_seed(0)
    shape, width = (head.out_features, head.in_features), head.in_features
    weight = torch.randn(shape, generator=generator, device=device).bfloat16() / width**0.5
    codes = quantize_weight(weight)
    x = torch.randn(num_tokens, width, generator=generator, device=device).bfloat16()
    x.requires_grad_()
    weight.requires_grad_(trained)
    labels = torch.randint(len(weight), (num_tokens,), generator=generator, device=device)

    def taken(forward: bool, backward: bool) -> Took:
        in_fp8 = Directions(forward, backward, _keeping(codes)) if forward or backward else None
        # All gradients are made together with the loss.
        return _took(lambda: linear_cross_entropy(x, weight, labels, in_fp8=in_fp8))

    plain = taken(False, False)
    return Timed(plain, taken(True, False)), Timed(plain, taken(False, True))


def _keeping(codes: Codes) -> Callable[[Tensor], Codes]:
    return lambda _: codes


def _took(function: Callable[[], object]) -> Took:
    """One of several calls in a row, by either clock the fastest of a few times.

    The GPU is kept waiting until all of them are in its queue: what it takes then is its own time,
    however slow or busy the host is. The host's is that of its processor.
    """
    function()
    tries: list[Took] = []
    cycles, doubled = _WAITING_CYCLES, 0
    while len(tries) < _REPEATS:
        torch.cuda.synchronize()
        waits, begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        waits.record()
        torch.cuda._sleep(cycles)
        begin.record()
        clock, start = time.perf_counter(), time.process_time()
        for _ in range(_CALLS):
            function()
        host = 1e3 * (time.process_time() - start) / _CALLS
        end.record()
        started = 1e3 * (time.perf_counter() - clock)
        end.synchronize()
        if started > waits.elapsed_time(begin) and doubled < _LONGEST_WAITS:
            cycles, doubled = 2 * cycles, doubled + 1  # the GPU has waited for the host
            continue
        tries.append(Took(begin.elapsed_time(end) / _CALLS, host))
    return Took(min(each.gpu for each in tries), min(each.host for each in tries))
