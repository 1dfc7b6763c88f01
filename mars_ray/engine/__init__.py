"""The decoding engine: continuous batching that decodes several tokens per forward in each sequence."""
