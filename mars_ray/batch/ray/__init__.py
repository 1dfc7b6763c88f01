"""Ray actors and Ray Data pipelines that run a job."""
