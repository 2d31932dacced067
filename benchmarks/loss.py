"""Linear layer and cross entropy, forward and backward, against the matrix products in them.

A GPU under load changes its clocks from second to second, so the ceiling is taken next to every
case: measurement and plain matrix products alternate, and the share is one median over the other.
6THV operations are counted whatever a provider computes; a share over 1 is what not computing
untrained rows is worth. T tokens, H hidden, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trainkit.bench.measure import peak_gib, timed
from trainkit.kernels import linear_cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
"""hidden (T, H), weight (V, H), labels (T,), their number on the device and on the host."""

PROVIDERS = ("trainkit", "liger", "torch_compile", "eager")
_ROUNDS = 5
_ROUND_MILLISECONDS = 60.0


@dataclass(frozen=True)
class Case:
    """One size.

    Args:
        tokens: T.
        hidden: H.
        vocab: V.
        trained: share of the tokens with a label.
        chunk_tokens: of trainkit's loss; None is its default.
    """

    tokens: int
    hidden: int
    vocab: int
    trained: float = 1.0
    chunk_tokens: int | None = None


CASES = (
    Case(16384, 896, 151936),
    Case(16384, 896, 151936, trained=0.5),
    Case(16384, 3584, 151936),
    Case(16384, 3584, 151936, trained=0.5),
    Case(32768, 896, 151936),
    Case(32768, 2048, 128256),
)


def run(
    cases: Sequence[Case],
    providers: Sequence[str],
    device: torch.device,
    *,
    matrix_size: int = 8192,
) -> Iterator[dict[str, Any]]:
    """Measure every case with every provider; only trainkit leaves out untrained rows.

    Args:
        cases: the sizes.
        providers: of `PROVIDERS`.
        device: where it runs.
        matrix_size: of the square matrices whose product is the ceiling.

    Yields:
        The case's fields and provider with ms, tflops, tflops_sustained (of the matrix products
        next to it), share_of_matmul and extra_memory_gib (over inputs and weight).
    """
    for case in cases:
        for provider in providers:
            if case.trained == 1.0 or provider == "trainkit":
                measured = measure(case, _loss_of(provider, case), device, matrix_size)
                yield {"case": _name(case), "provider": provider, **measured}


def measure(case: Case, loss: Loss, device: torch.device, matrix_size: int) -> dict[str, Any]:
    """Alternate a loss with matrix products, after a round that only warms up."""
    hidden, weight, labels = _inputs(case, device)
    num_trained = int((labels != -100).sum())
    num_items = torch.tensor(num_trained, device=device)

    def work() -> Tensor:
        hidden.grad = weight.grad = None
        result = loss(hidden, weight, labels, num_items, num_trained)
        result.backward()
        return result.detach()

    work()
    hidden.grad = weight.grad = None
    before = _allocated_gib(device)
    timed(work, 1, device)
    peak = peak_gib(device)

    product = _product(matrix_size, device)
    operations = 6.0 * case.tokens * case.hidden * case.vocab
    steps = min(25, max(2, int(_ROUND_MILLISECONDS / (operations / 6e11))))
    rounds = [
        (timed(work, steps, device)[0], timed(product, 25, device)[0]) for _ in range(_ROUNDS + 1)
    ][1:]
    milliseconds, ceiling = (sorted(times)[_ROUNDS // 2] for times in zip(*rounds, strict=True))
    tflops = operations / milliseconds / 1e9
    sustained = 2 * matrix_size**3 / ceiling / 1e9
    return {
        "ms": milliseconds,
        "tflops": tflops,
        "tflops_sustained": sustained,
        "share_of_matmul": tflops / sustained,
        "extra_memory_gib": None if peak is None else peak - before,
        "chunk_tokens": case.chunk_tokens,
    }


def _inputs(case: Case, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    kind: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    hidden = torch.randn(case.tokens, case.hidden, **kind).requires_grad_()
    weight = torch.randn(case.vocab, case.hidden, **kind).mul_(case.hidden**-0.5).requires_grad_()
    labels = torch.randint(0, case.vocab, (case.tokens,), device=device)
    labels[torch.rand(case.tokens, device=device) >= case.trained] = -100
    return hidden, weight, labels


def _loss_of(provider: str, case: Case) -> Loss:
    if provider == "trainkit":
        return lambda hidden, weight, labels, num_items, num_trained: linear_cross_entropy(
            hidden,
            weight,
            labels,
            num_items=num_items,
            num_trained=num_trained,
            chunk_tokens=case.chunk_tokens,
        )
    if provider == "liger":
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        def liger(hidden: Tensor, weight: Tensor, labels: Tensor, items: Tensor, _: int) -> Tensor:
            found = liger_fused_linear_cross_entropy(hidden, weight, labels, reduction="sum")
            return (found[0] if isinstance(found, tuple) else found) / items

        return liger
    if provider == "torch_compile":
        return torch.compile(_eager)
    return _eager


def _eager(hidden: Tensor, weight: Tensor, labels: Tensor, items: Tensor, _: int) -> Tensor:
    logits = functional.linear(hidden, weight).float()
    return functional.cross_entropy(logits, labels, reduction="sum") / items


def _product(size: int, device: torch.device) -> Callable[[], Tensor]:
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out)


def _allocated_gib(device: torch.device) -> float:
    return torch.cuda.memory_allocated() / 2**30 if device.type == "cuda" else 0.0


def _name(case: Case) -> str:
    return f"T{case.tokens} H{case.hidden} V{case.vocab} trained {case.trained}"
