"""From load to thresholds: pure functions, and what they go by."""
