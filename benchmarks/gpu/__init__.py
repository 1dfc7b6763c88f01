"""Measurements on a GPU, in a few minutes of it."""
