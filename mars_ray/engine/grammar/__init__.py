"""Structured answers: which tokens a schema or a regular expression allows next."""
