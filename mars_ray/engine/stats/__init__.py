"""Statistics of a running engine (acceptance by threshold, step times, latencies), and the choice of blocks."""
