"""One row: its identity, its form, its answer, what became of it."""
