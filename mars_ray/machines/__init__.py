"""Modelled machines: GPUs, networks by shape, and the time that a step takes on them."""
