"""From files to packed batches: messages, templates, masks, truncation, packing."""
