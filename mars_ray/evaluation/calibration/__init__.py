"""Measure each threshold of a model for its card."""
