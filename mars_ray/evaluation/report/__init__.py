"""The results of an evaluation as a page with charts."""
