"""Forwards of the network: packed inputs and model runners."""
