"""Compare decoders on the same requests."""
