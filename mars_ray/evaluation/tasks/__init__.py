"""The tasks of an evaluation: questions with references."""
