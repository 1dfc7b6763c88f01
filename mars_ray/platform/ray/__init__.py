"""Ray shells of the platform."""
