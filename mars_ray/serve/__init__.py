"""The endpoint: OpenAI's HTTP API in front of the engine, with access control as plain ASGI middleware."""
