"""Rows of a job: their ids, formats and results."""
