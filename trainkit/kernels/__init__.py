"""Triton kernels with their references; the public functions."""
