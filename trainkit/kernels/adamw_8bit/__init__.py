"""AdamW on bfloat16 weights with 8-bit moments: update, rounding by chance, quantising, at once."""
