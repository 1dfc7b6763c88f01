"""The engine: each step schedules, runs, verifies and commits tokens."""
