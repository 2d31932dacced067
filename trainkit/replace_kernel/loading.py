"""Patches models as they come out of transformers' loaders.

``from_pretrained`` and ``from_config`` both end in a classmethod of ``PreTrainedModel``. Each is
wrapped here, and what it returns is patched like any loaded model, so that the checks, the report
and the revert are the same.
"""

import functools
import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel

from trainkit.errors import PatchError
from trainkit.models.patch import PatchReport
from trainkit.patching import patch

logger = logging.getLogger(__name__)

_LOADERS = ("from_pretrained", "_from_config")
_wrapped: dict[str, Any] = {}
_loading: ContextVar[bool] = ContextVar("loading", default=False)
"""Whether a loader runs already: a model builds its parts through the same methods."""
_reports: WeakKeyDictionary[nn.Module, PatchReport] = WeakKeyDictionary()


def install() -> None:
    if _wrapped:
        return
    for loader in _LOADERS:
        original = PreTrainedModel.__dict__[loader]
        _wrapped[loader] = original
        setattr(PreTrainedModel, loader, classmethod(_patching(original.__func__)))


def undo() -> None:
    """Stop patching what is loaded from now on."""
    for loader in _wrapped:
        if not hasattr(PreTrainedModel.__dict__[loader].__func__, "_trainkit"):
            raise PatchError(
                f"PreTrainedModel.{loader} has been wrapped again by another library",
                fix="undo that one first",
            )
    for loader, original in _wrapped.items():
        setattr(PreTrainedModel, loader, original)
    _wrapped.clear()


def report_of(model: nn.Module) -> PatchReport:
    if model not in _reports:
        raise PatchError("this model was not patched while it was loaded")
    return _reports[model]


def _patching(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def load_and_patch(cls: type, *args: Any, **kwargs: Any) -> Any:
        if _loading.get():
            return load(cls, *args, **kwargs)
        token = _loading.set(True)
        try:
            loaded = load(cls, *args, **kwargs)
            # With output_loading_info=True it is a pair.
            model = loaded[0] if isinstance(loaded, tuple) else loaded
            if model.get_output_embeddings() is not None:
                report = _reports[model] = patch(model)
                logger.info("%s", report)
        finally:
            _loading.reset(token)
        return loaded

    load_and_patch._trainkit = True  # type: ignore[attr-defined]
    return load_and_patch
