"""Control policies: pure functions from load to thresholds, and the calculations that they share."""
