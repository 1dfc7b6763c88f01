"""Measure decoders against each other and against what the machine could do at best."""
