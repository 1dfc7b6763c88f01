"""Measure the accuracy, agreement and speed of a model."""
