"""GaLore and APOLLO: their projections are objects, which a checkpoint holds as plain values."""

import sys
from typing import Any

import torch

_KEY, _PLAIN = "projector", "projector_values"


def keep_projections(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Have ``state_dict`` hold no object of a class, so that nothing in a checkpoint can run.

    A projection is made again from its values; its class is that of the package at hand. Of a
    decomposed gradient it keeps the part that it uses, on the GPU and in checkpoints.

    Args:
        optimizer: of galore_torch or apollo_torch.
    """

    def pack(_: Any, saved: dict[str, Any]) -> dict[str, Any]:
        state = {
            number: {
                _PLAIN if key == _KEY else key: dict(vars(value)) if key == _KEY else value
                for key, value in entry.items()
            }
            for number, entry in saved["state"].items()
        }
        return {**saved, "state": state}

    def unpack(loading: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        state = {
            number: {
                _KEY if key == _PLAIN else key: _made(loading, value) if key == _PLAIN else value
                for key, value in entry.items()
            }
            for number, entry in saved["state"].items()
        }
        return {**saved, "state": state}

    _cut_projections(sys.modules[type(optimizer).__module__])
    optimizer.register_state_dict_post_hook(pack)
    optimizer.register_load_state_dict_pre_hook(unpack)
    return optimizer


def _cut_projections(module: Any) -> None:
    """Have the package's projections hold ``rank`` rows, where theirs are views of a square matrix.

    Of fp32 gradients, as masters have them, the packages keep a slice of what was decomposed, and
    with it the whole: 49 MiB of a 7B's matrix instead of 1.8.
    """
    plain = getattr(module, "GaLoreProjector", None)
    if plain is None or getattr(plain, "is_cut", False):
        return

    class GaLoreProjector(plain):  # type: ignore[misc, valid-type]
        is_cut = True

        def get_orthogonal_matrix(self, *args: Any, **more: Any) -> Any:
            found = super().get_orthogonal_matrix(*args, **more)
            return [part.clone() for part in found] if isinstance(found, list) else found.clone()

    module.GaLoreProjector = GaLoreProjector


def _made(optimizer: torch.optim.Optimizer, values: dict[str, Any]) -> Any:
    module = __import__(type(optimizer).__module__, fromlist=["*"])
    name = "GradientProjector" if "seed" in values else "GaLoreProjector"
    device = optimizer.param_groups[0]["params"][0].device
    made = object.__new__(getattr(module, name))
    for key, value in values.items():
        on_device = isinstance(value, torch.Tensor)
        made.__dict__[key] = value.to(device) if on_device else value
    return made
