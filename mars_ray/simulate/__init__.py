"""Simulate a cluster under the control of the same controller as in a real one."""
