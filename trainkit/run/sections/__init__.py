"""Parts of a run's report."""
