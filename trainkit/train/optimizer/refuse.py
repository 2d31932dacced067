"""What of an optimizer this machine cannot run: said before the model is loaded."""

import importlib.util

from trainkit.errors import RecipeError
from trainkit.options.optimizers import optimizer_row

KEY = "training.optim"


def refuse_unfit_optimizer(optim: str | None, *, on_gpu: bool) -> None:
    """Refuse an optimizer whose package or device is missing.

    Args:
        optim: the row's name; None is the default.
        on_gpu: the run computes on one.

    Raises:
        RecipeError: with the command that installs what is missing.
    """
    row = optimizer_row(optim)
    if row.package is not None and importlib.util.find_spec(row.package.module) is None:
        raise RecipeError(
            f"{row.name} needs the package {row.package.module}, which is not installed",
            where=KEY,
            fix=f'pip install "{row.package.pip}"',
        )
    if row.needs_gpu and not on_gpu:
        raise RecipeError(
            f"{row.name} runs on a GPU alone, and this run has none",
            where=KEY,
            fix="set training.optim: adamw_torch_fused",
        )
