"""Agent for `vllm serve`: it reports the load of the server's engine to a controller and follows its thresholds."""
