"""The decoding engine: continuous batching, with several tokens per forward for each sequence."""
