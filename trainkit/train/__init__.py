"""The composition root and the Trainer subclass."""
