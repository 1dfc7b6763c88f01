"""One row: its id, its format, its answer, its result."""
