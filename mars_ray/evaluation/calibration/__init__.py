"""Measure speed, agreement and accuracy of a model at each threshold, for its card."""
