"""Report of an evaluation: an HTML page with charts."""
