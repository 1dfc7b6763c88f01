"""Web pages of endpoints and reports, with a common style sheet and chart module."""
