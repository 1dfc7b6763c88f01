"""Simulate a cluster, controlled by the same controller as a real cluster."""
