"""Measurements on a GPU, for the first day with one. Nothing here has run on a GPU yet."""
