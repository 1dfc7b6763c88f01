"""The shells that put the endpoint on Ray Serve."""
