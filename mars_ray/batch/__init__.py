"""Answer a file of prompts row by row, into parquet files and an errors file."""
