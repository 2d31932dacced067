"""Patches the qwen2 models that are loaded afterwards, and no others."""

from trainkit.replace_kernel.loading import install

install("qwen2")
