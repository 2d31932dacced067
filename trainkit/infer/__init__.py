"""Answers from a trained model: its files, its prompts and stop tokens, streaming, batches."""
