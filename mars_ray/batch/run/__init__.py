"""Parts of a running job: plan, workers, progress and metrics."""
