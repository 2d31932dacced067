"""Answers from a trained model: its place, its prompts and stop tokens, streaming, batches."""
