"""Linear layer and cross entropy in one op, without the logits of all tokens at once."""
