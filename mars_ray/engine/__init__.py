"""The decode engine: continuous batching, a cursor per sequence, several tokens per forward."""
