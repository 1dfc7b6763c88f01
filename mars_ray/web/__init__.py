"""Pages of an endpoint and of reports, with one style sheet and one module of charts."""
