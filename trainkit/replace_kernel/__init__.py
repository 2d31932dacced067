"""``import trainkit.replace_kernel``: every causal language model loaded afterwards is patched.

``undo()`` ends it for models loaded later; a model that is already loaded keeps its kernels until
``report_of(model).revert()``.
"""

from trainkit.replace_kernel.loading import install, report_of, undo

__all__ = ["install", "report_of", "undo"]

install()
