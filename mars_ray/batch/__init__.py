"""Answer each row of the input files, and write the answers to parquet or JSONL files and the errors to an errors
file."""
