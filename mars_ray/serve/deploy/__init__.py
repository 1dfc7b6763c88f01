"""What an operator sets, and what has to be there before Ray Serve starts."""
