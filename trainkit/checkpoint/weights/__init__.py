"""Weights and adapters: reading, writing, telling them apart, and the files next to them."""
