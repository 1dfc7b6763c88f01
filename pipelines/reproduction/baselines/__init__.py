"""The decoders and heads that MARS is compared with, each on any unmodified network, one sequence at a time."""
