"""The thirteen families of generated tasks, one per file."""
