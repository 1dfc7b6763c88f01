"""The command line: each command turns its arguments into options, makes one call, and shows the result."""
