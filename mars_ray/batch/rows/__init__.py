"""A row of a job: its id, its format and its result."""
