"""Cross entropy on logits: loss and gradient in one pass."""
