"""The engines behind the routes, and which of them a request goes to."""
