"""The adapted layers of a model, for tests."""

from collections.abc import Mapping

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn


def adapted_layers(model: nn.Module) -> Mapping[str, BaseTunerLayer]:
    """The layers that carry adapters, by full module name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, BaseTunerLayer)}
