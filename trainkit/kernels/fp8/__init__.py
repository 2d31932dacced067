"""Rows in 8 bits (e4m3) with a scale each, and their products on the tensor cores for them."""
