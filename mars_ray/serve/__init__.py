"""The endpoint: OpenAI's HTTP API in front of the engine, behind a guard that is plain ASGI."""
