"""Rows become samples: drafts, the store and its cache, workers, packing and mixing, the ledger."""
