"""The engine that steps: schedule, run, verify, commit."""
