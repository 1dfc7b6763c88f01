"""Makers and verifiers of the thirteen families of generated tasks."""
