"""Grammars: restrict the next token to those that a JSON schema or regular expression allows."""
