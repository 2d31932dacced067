"""The weights' part of a backward pass split by ``zbv``, where torch itself gets it wrong.

Before 2.13, torch adds up the gradients of all outputs of an autograd function and takes the sum
for that of the first output. Where a function has several outputs (rotary embeddings of q and k,
the norm of a sum and the sum itself) that is an error at best, and other gradients at worst.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.pipelining._backward import _get_grad_fn_or_grad_acc

IS_WRONG = torch.torch_version.TorchVersion(torch.__version__) < "2.13"
"""Of this version of torch."""


def keep_alive(outputs: torch.Tensor | Sequence[torch.Tensor]) -> tuple[GradientEdge, ...]:
    """What holds a stage's graph, whose outputs ``stage_backward_input`` lets go of.

    Before 2.13, the node of an autograd function in Python is gone with them.
    """
    listed = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    return tuple(get_gradient_edge(each) for each in listed if each.requires_grad)


def add_weight_gradients(
    weights: Sequence[torch.nn.Parameter], groups: Sequence[dict[str, Any]]
) -> None:
    """Add to the gradients of a stage's weights what ``stage_backward_input`` has left out.

    Args:
        weights: all of the stage.
        groups: as that function returns them: ``params``, the nodes that gather the gradients of
            some weights; ``intermediates``, the nodes from which both these weights and the
            stage's input are reached; ``grads``, of each intermediate's outputs.
    """
    owners: Mapping[Any, torch.nn.Parameter] = {
        _get_grad_fn_or_grad_acc(weight): weight for weight in weights
    }
    for group in groups:
        nodes, grads = list(group.pop("intermediates")), group.pop("grads", None)
        if grads is None:
            continue
        pairs = [(node, given) for node, given in zip(nodes, grads, strict=True) if given]
        found = [
            (GradientEdge(node, output), grad)
            for node, given in pairs
            for output, grad in enumerate(given)
            if grad is not None
        ]
        if not found:
            continue
        # What reaches a node through another one has been counted in its gradients already.
        handles = [node.register_prehook(_instead(given)) for node, given in pairs]
        edges, values = zip(*found, strict=True)
        wanted = tuple(GradientEdge(node, 0) for node in group["params"])
        try:
            made = torch.autograd.grad(edges, wanted, grad_outputs=values)
        finally:
            for handle in handles:
                handle.remove()
        for node, grad in zip(group["params"], made, strict=True):
            weight = owners[node]
            weight.grad = grad if weight.grad is None else weight.grad.add_(grad)


def _instead(given: tuple[Any, ...]) -> Any:
    def replace(_: tuple[Any, ...]) -> tuple[Any, ...]:
        return given

    return replace
