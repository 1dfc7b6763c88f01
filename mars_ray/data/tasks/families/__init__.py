"""The twelve families of generated tasks, one per file."""
