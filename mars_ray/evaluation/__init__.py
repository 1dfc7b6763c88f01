"""Measure accuracy, agreement and speed of a model."""
