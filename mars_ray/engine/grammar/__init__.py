"""Structured answers: the tokens that a schema or a regular expression allows next."""
