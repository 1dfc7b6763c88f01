"""Control policies: pure functions from the load to thresholds, one a file, and what they go by."""
