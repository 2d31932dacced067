"""``import trainkit.replace_kernel``: every supported model loaded afterwards is patched.

``import trainkit.replace_kernel.qwen2`` patches models of that family only; naming several families
patches those. ``undo()`` ends it for models loaded later; a model that is already loaded keeps its
kernels until ``report_of(model).revert()``.
"""

from trainkit.replace_kernel.loading import install, report_of, undo

__all__ = ["install", "report_of", "undo"]

install()
