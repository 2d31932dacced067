"""trainkit: fine-tune causal language models end to end.

``trainkit.patch(model)`` swaps trainkit's kernels into a loaded model
and fuses its adapters. Importing the package itself
imports neither torch nor transformers; ``patch`` is looked up on first use.
"""

from trainkit.version import __version__

TYPE_CHECKING = False  # `python -m trainkit` would take a typing.py of the current directory
if TYPE_CHECKING:
    from typing import Any

__all__ = ["__version__", "patch"]


def __getattr__(name: str) -> "Any":
    if name == "patch":
        from trainkit.patching import patch

        return patch
    raise AttributeError(f"module 'trainkit' has no attribute {name!r}")
