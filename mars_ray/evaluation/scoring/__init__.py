"""Scores, agreement and statistics: how answers become metrics."""
