"""Decoders side by side on the same requests, and what a step must at least take."""
