"""From answers to figures: judges, agreement, statistics."""
