"""The Ray Data shells of a job."""
