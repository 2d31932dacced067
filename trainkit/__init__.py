"""trainkit: fine-tune causal language models end to end.

``trainkit.patch(model)`` swaps trainkit's kernels into a loaded model
and fuses its adapters. Importing the package itself
imports neither torch nor transformers; ``patch`` is looked up on first use.
"""

from trainkit.version import __version__

__all__ = ["__version__", "patch"]


# No types: `python -m trainkit` runs this first, and would take the current directory's typing.py.
def __getattr__(name: str):
    if name == "patch":
        from trainkit.patching import patch

        return patch
    raise AttributeError(f"module 'trainkit' has no attribute {name!r}")
