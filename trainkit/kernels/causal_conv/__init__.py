"""A causal depthwise convolution over packed documents, with its activation."""
