"""From samples to batches: streaming and the collators."""
