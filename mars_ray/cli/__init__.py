"""The command line: arguments to settings, one call, the result shown."""
