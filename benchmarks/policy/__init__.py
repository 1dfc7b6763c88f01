"""Compare policies on the same traces and simulated clusters."""
