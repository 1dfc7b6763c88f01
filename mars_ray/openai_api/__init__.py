"""OpenAI's HTTP API as types and pure functions, which check requests and build answers and errors."""
