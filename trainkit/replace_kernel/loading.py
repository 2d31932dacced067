"""Patches models as they come out of transformers' loaders.

``from_pretrained`` and ``from_config`` both end in a classmethod of ``PreTrainedModel``. Each is
wrapped here, and what it returns is patched like any loaded model, so that the checks, the report
and the revert are the same.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel

from trainkit.errors import PatchError
from trainkit.models.families import FAMILIES
from trainkit.models.patch import PatchReport
from trainkit.patching import patch

logger = logging.getLogger(__name__)

_LOADERS = ("from_pretrained", "_from_config")
_wrapped: dict[str, Any] = {}
_chosen: set[str] = set()
_reports: WeakKeyDictionary[nn.Module, PatchReport] = WeakKeyDictionary()


def install(family: str | None = None) -> None:
    """Patch models from now on.

    Args:
        family: only models of this row and of those named before; None for all, unless families
            have been named (a submodule's import always runs the package's first).
    """
    if family is not None:
        _chosen.add(FAMILIES[family].name)
    if _wrapped:
        return
    for loader in _LOADERS:
        original = PreTrainedModel.__dict__[loader]
        _wrapped[loader] = original
        setattr(PreTrainedModel, loader, classmethod(_patching(original.__func__)))


def undo() -> None:
    """Stop patching what is loaded from now on, and forget the families named.

    Raises:
        PatchError: another library has wrapped transformers' loading since.
    """
    for loader in _wrapped:
        if not hasattr(PreTrainedModel.__dict__[loader].__func__, "_trainkit"):
            raise PatchError(
                f"PreTrainedModel.{loader} has been wrapped again by another library",
                fix="undo that one first",
            )
    for loader, original in _wrapped.items():
        setattr(PreTrainedModel, loader, original)
    _wrapped.clear()
    _chosen.clear()


def report_of(model: nn.Module) -> PatchReport:
    """The report of a model that was patched while it was loaded.

    Raises:
        PatchError: it was not.
    """
    if model not in _reports:
        raise PatchError("this model was not patched while it was loaded")
    return _reports[model]


def _patching(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def load_and_patch(cls: type, *args: Any, **kwargs: Any) -> Any:
        loaded = load(cls, *args, **kwargs)
        # With output_loading_info=True it is a pair.
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        for family in FAMILIES.values():
            # By the class, not by model_type: sub-models are built through the same method.
            if type(model).__name__ == family.causal_lm and (not _chosen or family.name in _chosen):
                report = _reports[model] = patch(model)
                logger.info("%s", report)
        return loaded

    load_and_patch._trainkit = True  # type: ignore[attr-defined]
    return load_and_patch
