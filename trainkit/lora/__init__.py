"""Adapters: attach, save, merge, and the fused backward."""
