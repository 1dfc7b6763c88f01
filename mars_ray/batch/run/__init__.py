"""A running job: plan, worker, progress and metrics."""
