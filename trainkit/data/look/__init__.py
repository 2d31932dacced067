"""Looking at data: preview, check, statistics."""
