"""A cluster that is not there, with the controller that a real one has."""
