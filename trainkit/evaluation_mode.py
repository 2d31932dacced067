"""A model, or attributes of anything, in another state for a while."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Within, no module trains; afterwards each is as it was: some may be held in evaluation."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training


@contextmanager
def changed(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Within, attributes have other values: owner, name and value of each."""
    before = []
    try:
        for owner, name, value in changes:
            before.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)
