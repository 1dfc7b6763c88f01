"""Shells (thin layers) that run the endpoint on Ray Serve."""
