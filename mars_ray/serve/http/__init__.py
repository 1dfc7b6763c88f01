"""The routes of the endpoint, the streams of its answers, its log and metrics."""
