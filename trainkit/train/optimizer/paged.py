"""States in pages that host and GPU share stay there when a run is resumed.

bitsandbytes loads them into the GPU's own memory: 15 GiB of it for 8B parameters in 8 bits, of a
run that was paged because there is no such room.
"""

from typing import Any

import torch

SMALLEST = 100_000
"""Numbers from which bitsandbytes pages a state."""


def keep_pages(optimizer: Any) -> Any:
    """Have an optimizer of bitsandbytes load states to where it would have made them.

    Args:
        optimizer: paged or not; nothing changes for one that is not.

    Returns:
        The same.
    """
    if not optimizer.is_paged:
        return optimizer
    load = optimizer.load_state_dict

    def load_into_pages(state_dict: dict[str, Any]) -> None:
        load(state_dict, move_to_device=False)
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[key] = _placed(optimizer, parameter, key, value)

    optimizer.load_state_dict = load_into_pages
    return optimizer


def _placed(optimizer: Any, parameter: torch.Tensor, key: str, value: torch.Tensor) -> torch.Tensor:
    """A loaded state where the optimizer would have made it."""
    is_state = key.startswith("state") and value.shape == parameter.shape
    if not is_state or value.numel() < SMALLEST:
        return value.to(parameter.device)
    room: torch.Tensor = optimizer.get_state_buffer(parameter, dtype=value.dtype)
    return room.copy_(value)
