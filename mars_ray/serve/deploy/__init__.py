"""Operator settings, and the setup that must happen before Ray Serve starts."""
