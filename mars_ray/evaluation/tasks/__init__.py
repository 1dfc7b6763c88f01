"""Tasks of an evaluation: questions with references."""
