"""The tasks of an evaluation: questions, and what judges their answers."""
