"""The twelve families of generated tasks, one a file."""
