"""The composition root and the training loop."""
