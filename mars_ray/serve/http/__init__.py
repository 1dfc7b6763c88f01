"""Routes of the endpoint, response streams, log and metrics."""
