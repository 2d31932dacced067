"""What must hold before a class is swapped: one kernel library at a time."""

import sys

from torch import nn
from torch.nn import functional

from trainkit.errors import PatchError

_FOREIGN = "liger_kernel"


def refuse_replaced(model: nn.Module) -> None:
    """Refuse a process in which another library has replaced the model's classes or functions.

    Raises:
        PatchError: naming what it replaced.
    """
    candidates: dict[str, object] = {
        "torch.nn.functional.cross_entropy": functional.cross_entropy,
    }
    for kind in {type(module) for module in model.modules()}:
        modeling = sys.modules.get(kind.__module__)
        if not kind.__module__.startswith("transformers.models.") or modeling is None:
            continue
        found = getattr(modeling, kind.__name__, kind)
        if found.__module__ != modeling.__name__:
            raise PatchError(
                f"{kind.__name__} has been replaced by {found.__module__}.{found.__qualname__}",
                where=modeling.__name__,
                fix="use one kernel library at a time: load the model in a fresh process without "
                "it",
            )
        candidates |= {
            f"{modeling.__name__}.{name}": value
            for name, value in vars(modeling).items()
            if callable(value)
        }
    for name, function in candidates.items():
        if (getattr(function, "__module__", None) or "").startswith(_FOREIGN):
            raise PatchError(
                f"Liger has already replaced {name} in this process",
                fix="do not apply Liger (or `use_liger_kernel`) together with trainkit's kernels",
            )
