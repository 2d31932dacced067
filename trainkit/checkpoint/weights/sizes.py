"""Sizes as people write them. No torch."""

import re

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str) -> int:
    """Bytes of a size like ``5GB``, ``500MB`` or ``2GiB``.

    Raises:
        ValueError: it is not a known size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([A-Z]+)", text.strip().upper())
    if match is None or match[2] not in _UNITS or float(match[1]) <= 0:
        raise ValueError(f"{text!r} is not a size such as 5GB or 500MB")
    return int(float(match[1]) * _UNITS[match[2]])
