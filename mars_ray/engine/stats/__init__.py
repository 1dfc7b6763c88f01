"""What the engine learns while it runs: acceptance by threshold, step times, latencies."""
