"""Patches the qwen2_vl models that are loaded afterwards, and no others."""

from trainkit.replace_kernel.loading import install

install("qwen2_vl")
