"""Programs around the package: training data, adapters, the reproduction; each runs as `python -m pipelines.NAME`."""
