"""Thin layers, called shells, that run the endpoint on Ray Serve."""
