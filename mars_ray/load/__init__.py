"""A load generator for OpenAI-compatible endpoints."""
