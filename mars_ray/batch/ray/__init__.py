"""The shells that put a job on Ray Data."""
