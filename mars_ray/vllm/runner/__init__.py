"""Subclasses of vLLM's classes. Only the files here import vLLM."""
