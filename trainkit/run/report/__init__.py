"""What is drawn from the record of a run: its curves, and the report page."""
