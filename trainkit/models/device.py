"""The device that a command line names."""

import torch

from trainkit.errors import ModelError


def device_named(name: str | None) -> torch.device:
    """``cpu``, ``cuda``, ``cuda:1``; the GPU if there is one for ``auto`` and None.

    Raises:
        ModelError: there is no such device, here or at all.
    """
    if name in (None, "auto"):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fix = "write cpu, cuda, or cuda:1 for the second GPU"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ModelError(f"{name!r} is no device", where="--device", fix=fix) from None
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        has = {0: "no GPU", 1: "one GPU"}.get(count, f"{count} GPUs")
        raise ModelError(f"{name}: torch finds {has} here", where="--device", fix=fix)
    return device
