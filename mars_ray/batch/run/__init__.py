"""A job while it runs: the worker around an engine, progress, metrics."""
