"""The run directory: metrics, environment, plots, report, console. No torch at import."""
