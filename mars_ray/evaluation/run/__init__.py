"""Run an evaluation, from its options to its report."""
