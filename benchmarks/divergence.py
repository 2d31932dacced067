"""The divergence from a teacher on both heads, forward and backward, next to TRL and products.

``python -m benchmarks.divergence OUTPUT`` appends its rows. A student that is adapted leaves its
head as it is; one that is trained in full wants the weight's gradient, too.
"""

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from trainkit.bench.cells import append, environment
from trainkit.bench.measure import peak_gib, timed
from trainkit.kernels import linear_divergence

TOKENS, VOCAB = 8192, 151936
HIDDEN = ((3584, 3584), (896, 3584))
"""Of the student and the teacher."""
SHARES = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.5}
"""TRL tells them apart by the teacher's share."""


def measured(work: Callable[[], Tensor]) -> dict[str, float]:
    """The median of some calls after two that compile, and what they take on top."""
    device = torch.device("cuda")
    timed(work, 2, device)
    before = torch.cuda.memory_allocated() / 2**30
    milliseconds, _ = timed(work, 5, device)
    return {"ms": milliseconds, "extra_memory_gib": (peak_gib(device) or 0.0) - before}


def providers(kind: str, parts: tuple[Tensor, ...]) -> dict[str, Callable[[], Tensor]]:
    """What is done, by who does it; the products are those of a frozen head, and nothing else."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    hidden, weight, teacher, teacher_weight, labels = parts

    def ours() -> Tensor:
        hidden.grad = weight.grad = None
        given = (hidden, weight, labels, teacher, teacher_weight)
        loss, _ = linear_divergence(*given, kind=kind, num_trained=TOKENS)
        (loss / TOKENS).backward()
        return loss.detach()

    def trl() -> Tensor:
        hidden.grad = weight.grad = None
        sides = (hidden, weight, None, teacher, teacher_weight, None)
        losses, _ = ChunkedDivergenceFunction.apply(*sides, SHARES[kind])
        (losses.sum() / TOKENS).backward()
        return losses.detach()

    def products() -> Tensor:
        with torch.no_grad():
            logits = hidden @ weight.t()
            torch.mm(teacher, teacher_weight.t(), out=logits)
            return torch.mm(logits, weight)

    return {"trainkit": ours, "trl": trl, "products of a frozen head": products}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output
    for sizes, kind, frozen in itertools.product(HIDDEN, SHARES, (True, False)):
        torch.manual_seed(0)
        drawn = []
        for size in sizes:
            drawn.append(torch.randn(TOKENS, size, device="cuda").bfloat16())
            weight = torch.randn(VOCAB, size, device="cuda") * 2 * size**-0.5
            drawn.append(weight.bfloat16())
        drawn[0].requires_grad_()
        drawn[1].requires_grad_(not frozen)
        labels = torch.randint(VOCAB, (TOKENS,), device="cuda")
        for provider, work in providers(kind, (*drawn, labels)).items():
            head = "frozen" if frozen else "trained"
            row = {"case": f"{kind}, H {sizes[0]} from {sizes[1]}, head {head}"}
            row |= {"bench": "divergence", "provider": provider, "tokens": TOKENS, "vocab": VOCAB}
            append(output, [{**row, **measured(work), **environment()}])


if __name__ == "__main__":
    main()
