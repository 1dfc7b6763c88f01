"""Programs that measure what the documentation claims; each runs as `python -m benchmarks.NAME`."""
