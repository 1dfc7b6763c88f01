"""Baselines for MARS: decoders and heads for unmodified networks, one sequence at a time."""
