"""Compiled CPU kernels: packed weights, and a decoder step in one call."""
