"""Settings of the operator, and the preparations before Ray Serve starts."""
