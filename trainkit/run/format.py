"""Numbers for people: short, with units, the same on the console, in plots and in reports."""

from __future__ import annotations

import math

Number = float | int | str | None


def as_float(value: Number) -> float | None:
    """A metric as a float (``"NaN"`` strings of ``metrics.jsonl`` included), None if it is not."""
    if value is None or isinstance(value, bool):
        return None
    try:
        return float(value)
    except (ValueError, TypeError, OverflowError):
        return None


def format_loss(value: Number) -> str:
    """Four decimals: ``2.3417``."""
    number = as_float(value)
    if number is None:
        return str(value)
    return f"{number:.4f}" if math.isfinite(number) and abs(number) < 1e4 else f"{number:.3g}"


def format_number(value: Number) -> str:
    """Three significant digits: ``0.00123``, ``1.5e-05``, ``12.3``."""
    number = as_float(value)
    if number is None:
        return str(value)
    if number != 0 and not 1e-3 <= abs(number) < 1e9:
        return f"{number:.2e}"
    return f"{number:.3g}" if abs(number) < 1000 else f"{number:,.0f}"


def format_count(value: Number) -> str:
    """Thousands and up with a letter: ``950``, ``12.3k``, ``4.56M``."""
    number = as_float(value)
    if number is None or not math.isfinite(number):
        return str(value)
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= scale:
            return f"{number / scale:.3g}{letter}"
    return f"{number:.0f}"


def format_duration(seconds: float) -> str:
    """``42s``, ``3m07s``, ``2h05m``, ``3d04h``."""
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
