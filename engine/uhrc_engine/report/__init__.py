"""What a run is reported as: one summary a run, as a table and as JSON."""
