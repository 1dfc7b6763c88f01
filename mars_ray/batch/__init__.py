"""Decode a file of prompts, row by row, into parquet; what cannot be decoded goes to an errors file."""
