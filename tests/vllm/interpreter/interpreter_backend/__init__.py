"""A backend of Triton whose driver is active, which vLLM looks for. Under Triton's interpreter nothing else is used.

Tests put the parent folder on the PYTHONPATH of the processes that they start.
"""
