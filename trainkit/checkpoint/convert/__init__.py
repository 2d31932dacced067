"""GLM-4 checkpoints as Qwen2's and back, proved layer by layer."""
