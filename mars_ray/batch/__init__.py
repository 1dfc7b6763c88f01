"""Answer files of prompts row by row, and write the answers to parquet files and the errors to an errors file."""
