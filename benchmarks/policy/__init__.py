"""Policies side by side on the same traces and simulated clusters."""
