"""The endpoint: OpenAI's HTTP API in front of the engine, behind access control that is plain ASGI."""
