"""Optimizers: the table of ``training.optim``, its arguments, and other tools' names."""

from trainkit.options.optimizers.table import (
    DEFAULT,
    FSDP2,
    OPTIMIZERS,
    OURS,
    SERVED,
    ZERO,
    Argument,
    Optimizer,
    Package,
    nearest_of,
    optimizer_row,
    parts_of,
    served_as,
)

__all__ = [
    "DEFAULT",
    "FSDP2",
    "OPTIMIZERS",
    "OURS",
    "SERVED",
    "ZERO",
    "Argument",
    "Optimizer",
    "Package",
    "nearest_of",
    "optimizer_row",
    "parts_of",
    "served_as",
]
