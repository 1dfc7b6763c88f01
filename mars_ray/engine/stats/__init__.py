"""Statistics of a running engine: acceptance by threshold, step times, latencies; the choice of blocks."""
