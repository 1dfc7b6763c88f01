"""Forwards of the network: packed inputs, model runners and compiled steps."""
