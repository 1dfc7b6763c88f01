"""Compute scores, agreement and statistics from answers."""
