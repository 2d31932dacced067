"""Gated delta rule and causal convolution over packed documents."""
