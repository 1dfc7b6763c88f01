"""From answers to metrics: scores, agreement, statistics."""
