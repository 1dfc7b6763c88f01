"""The engine that steps: plan, run, verify, commit."""
